"""Mistakes in amp_loop, each with the spec that must catch it."""

from kit.answers.loading import Wrong

UNSCALE = """        # Unscale before anything looks at the gradients: scaled ones are 65536 times too long,
        # and clipping those would leave a step of next to nothing.
        scaler.unscale_(optimizer)
"""
BACKWARD = """    # Outside autocast: backward runs each operation in the dtype that its forward had.
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
"""

WRONG = [
    # Part 1
    Wrong(
        name="returns_the_scaled_loss",
        belief="The loss is what backward was called on.",
        caught_by="test_moves_every_weight_and_returns_the_true_loss[fp16]",
        says="still multiplied by the scale",
        edits=(
            (
                "        scaler.scale(loss).backward()\n",
                "        loss = scaler.scale(loss)\n        loss.backward()\n",
            ),
        ),
    ),
    Wrong(
        name="returns_the_loss_with_its_graph",
        belief="A scalar is small, so it can be kept.",
        caught_by="test_moves_every_weight_and_returns_the_true_loss[fp32]",
        says="without a graph",
        edits=(
            (
                "StepResult(loss.detach().float(), grad_norm, skipped=False)",
                "StepResult(loss, grad_norm, False)",
            ),
        ),
    ),
    Wrong(
        name="autocast_in_float32_too",
        belief="float32 under autocast is float32: the default dtype will do.",
        caught_by="test_in_float32_it_is_the_plain_loop",
        says="autocast is on in float32",
        edits=(
            (
                "with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):",
                "with torch.autocast(inputs.device.type, dtype=dtype if mixed else torch.bfloat16):",
            ),
        ),
    ),
    Wrong(
        name="backward_under_autocast",
        belief="What belongs to the step belongs under autocast.",
        caught_by="test_runs_forward_and_loss_under_autocast_and_backward_outside",
        says="backward() is inside the autocast block",
        edits=(
            (
                "        loss = loss_fn(model(inputs).float(), targets)\n",
                "        loss = loss_fn(model(inputs).float(), targets)\n"
                "        (loss if scaler is None else scaler.scale(loss)).backward()\n",
            ),
            (BACKWARD + UNSCALE, "    if scaler is not None:\n" + UNSCALE),
        ),
    ),
    Wrong(
        name="autocast_without_its_dtype",
        belief="autocast knows which 16-bit type is meant.",
        caught_by="test_runs_forward_and_loss_under_autocast_and_backward_outside[fp16]",
        says="dtypes inside the model",
        edits=(
            (
                "with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):",
                "with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=mixed):",
            ),
        ),
    ),
    Wrong(
        name="the_loss_outside_autocast",
        belief="Only the model needs autocast.",
        caught_by="test_runs_forward_and_loss_under_autocast_and_backward_outside",
        says="the loss is outside the autocast block",
        edits=(
            (
                "        loss = loss_fn(model(inputs).float(), targets)\n",
                "        output = model(inputs).float()\n    loss = loss_fn(output, targets)\n",
            ),
        ),
    ),
    Wrong(
        name="casts_the_model",
        belief="Mixed precision is a model in 16 bits (an article's code calls model.half()).",
        caught_by="test_keeps_weights_gradients_and_optimizer_state_in_float32[bf16]",
        says="the model is cast, not autocast",
        edits=(
            (
                "    optimizer.zero_grad()\n    mixed",
                "    optimizer.zero_grad()\n    model.to(dtype)\n    mixed",
            ),
        ),
    ),
    Wrong(
        name="never_unscales",
        belief="scaler.step() does all that is needed, and the norm is the norm.",
        caught_by="test_steps_with_the_true_gradients[fp16]",
        says="the gradients have not been unscaled",
        edits=((UNSCALE, ""),),
    ),
    Wrong(
        name="clips_before_unscaling",
        belief="Clipping comes right after backward.",
        caught_by="test_clips_the_true_gradients_not_the_scaled_ones[fp16]",
        says="clipping ran before unscale_",
        edits=(
            (UNSCALE, ""),
            (
                "        clip_grads_with_norm_(parameters, max_norm, grad_norm)\n",
                "        clip_grads_with_norm_(parameters, max_norm, grad_norm)\n"
                "    if scaler is not None:\n        scaler.unscale_(optimizer)\n",
            ),
        ),
    ),
    Wrong(
        name="returns_the_norm_after_clipping",
        belief="The gradient norm is that of the gradients that are used.",
        caught_by="test_clips_the_true_gradients_not_the_scaled_ones",
        says="it is the norm of clipped",
        edits=(
            (
                "        clip_grads_with_norm_(parameters, max_norm, grad_norm)\n",
                "        clip_grads_with_norm_(parameters, max_norm, grad_norm)\n"
                "        grad_norm = get_total_norm(gradients)\n",
            ),
        ),
    ),
    Wrong(
        name="scales_every_gradient_to_max_norm",
        belief="Clipping to a norm makes the norm that.",
        caught_by="test_leaves_gradients_shorter_than_max_norm_alone",
        says="scaled to max_norm, not clipped",
        edits=(
            (
                "        clip_grads_with_norm_(parameters, max_norm, grad_norm)\n",
                "        for gradient in gradients:\n            gradient.mul_(max_norm / grad_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="saves_in_float32_and_computes_in_16_bits",
        belief="Inputs of each layer must be kept in float32 for exact gradients.",
        caught_by="test_holds_activations_in_sixteen_bits",
        says="activations are kept in float32",
        edits=(
            (
                "    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):\n",
                "    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed), "
                "torch.autograd.graph.saved_tensors_hooks(\n"
                "        lambda t: (t.float() if t.is_floating_point() else t, t.dtype),"
                " lambda p: p[0].to(p[1])\n    ):\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_a_16_bit_copy_of_the_model",
        belief="AMP needs the weights in both precisions, kept side by side.",
        caught_by="test_leaves_the_bytes_of_state_as_they_are",
        says="a second copy of the weights",
        edits=(
            (
                "    optimizer.zero_grad()\n    mixed",
                "    optimizer.zero_grad()\n"
                "    model.half_weights = [p.detach().to(dtype) for p in parameters]\n    mixed",
            ),
        ),
    ),
    Wrong(
        name="the_loss_in_float16",
        belief="Under autocast the loss function takes what the model gives.",
        caught_by="test_a_float16_loss_does_not_overflow_the_first_step",
        says="its scaled gradient starts out infinite",
        edits=(("loss_fn(model(inputs).float(), targets)", "loss_fn(model(inputs), targets)"),),
    ),
    Wrong(
        name="the_loss_turned_to_float32_too_late",
        belief="loss.float() is enough against overflow.",
        caught_by="test_a_float16_loss_does_not_overflow_the_first_step",
        says="its scaled gradient starts out infinite",
        edits=(
            ("loss_fn(model(inputs).float(), targets)", "loss_fn(model(inputs), targets).float()"),
        ),
    ),
    Wrong(
        name="steps_without_asking_the_scaler",
        belief="After unscale_ the optimizer can step by itself.",
        caught_by="test_one_bad_gradient_of_many_changes_nothing",
        says="weights",
        edits=(
            (
                "    scaler.step(optimizer)\n    scaler.update()",
                "    optimizer.step()\n    scaler.update()",
            ),
        ),
    ),
    Wrong(
        name="reads_the_overflow_off_the_norm",
        belief="An infinite norm means an infinite gradient.",
        caught_by="test_a_huge_but_finite_gradient_is_no_overflow",
        says="the norm is taken for the overflow test",
        edits=(("skipped=scaler.get_scale() < scale)", "skipped=not bool(grad_norm.isfinite()))"),),
    ),
    Wrong(
        name="never_updates_the_scale",
        belief="The scale is a constant.",
        caught_by="test_updates_the_scaler_once_a_step",
        says="unscale_() is being called after step()",
        raises=RuntimeError,
        edits=(("    scaler.update()\n    # The scale", "    # The scale"),),
    ),
    Wrong(
        name="updates_the_scale_twice",
        belief="update() before and after, to be sure.",
        caught_by="test_updates_the_scaler_once_a_step",
        says="No inf checks",
        raises=AssertionError,
        edits=(
            (
                "    scaler.update()\n    # The scale",
                "    scaler.update()\n    scaler.update()\n    # The scale",
            ),
        ),
    ),
    Wrong(
        name="clears_gradients_after_the_step_only",
        belief="Gradients are cleared at the end, so they are clear at the start.",
        caught_by="test_ignores_gradients_from_before_the_step",
        says="the first step has stale ones",
        edits=(("    optimizer.zero_grad()\n    mixed", "    mixed"),),
    ),
    Wrong(
        name="clips_the_parameters_of_the_model",
        belief="The optimizer's parameters are the model's.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters",
        says="the norm runs over model.parameters()",
        edits=(
            (
                '[p for group in optimizer.param_groups for p in group["params"]]\n\n',
                "list(model.parameters())\n\n",
            ),
        ),
    ),
    Wrong(
        name="a_scaler_is_harmless_with_bfloat16",
        belief="A loss scaler never hurts.",
        caught_by="test_refuses_bad_input_before_anything_is_changed[stray_scaler]",
        says="bfloat16",
        edits=(
            (
                "    if (scaler is not None) != (dtype == torch.float16):\n",
                "    if scaler is None and dtype == torch.float16:\n",
            ),
        ),
    ),
    Wrong(
        name="checks_after_clearing_the_gradients",
        belief="Clearing gradients changes nothing that matters.",
        caught_by="test_refuses_bad_input_before_anything_is_changed",
        says="the input is checked too late",
        edits=(
            (
                "    _check_step(batch, scaler, dtype, max_norm)\n",
                "    optimizer.zero_grad()\n    _check_step(batch, scaler, dtype, max_norm)\n",
            ),
        ),
    ),
    # Part 2
    Wrong(
        name="unscale_multiplies",
        belief="Unscaling is multiplying by the scale.",
        caught_by="test_scales_the_loss_and_unscales_the_gradients",
        says="is not gradient / scale",
        edits=(("grad.mul_(1.0 / self._scale)", "grad.mul_(self._scale)"),),
    ),
    Wrong(
        name="never_grows",
        belief="A scale only has to fall.",
        caught_by="test_tracks_gradscaler_through_every_pattern_of_overflows",
        says="scale after step",
        edits=(("                if grown <=", "                if False and grown <="),),
    ),
    Wrong(
        name="counts_good_steps_across_overflows",
        belief="growth_interval good steps, with or without overflows between.",
        caught_by="test_tracks_gradscaler_through_every_pattern_of_overflows",
        says="count good steps in a row",
        edits=(
            (
                "            self._scale *= self._backoff_factor\n            self._good_steps = 0\n",
                "            self._scale *= self._backoff_factor\n",
            ),
        ),
    ),
    Wrong(
        name="looks_for_infinities_only",
        belief="An overflow is an infinity.",
        caught_by="test_one_bad_gradient_anywhere_stops_everything[nan]",
        says="not every element",
        edits=(("not largest.isfinite()", "bool(largest.isinf())"),),
    ),
    Wrong(
        name="looks_at_the_first_gradient",
        belief="If one overflows, the first does.",
        caught_by="test_one_bad_gradient_anywhere_stops_everything[inf]",
        says="not every element",
        edits=(
            (
                "get_total_norm(grads, math.inf)",
                "get_total_norm(grads[:1], math.inf)",
            ),
        ),
    ),
    Wrong(
        name="one_flag_for_all_optimizers",
        belief="An overflow anywhere stops every optimizer.",
        caught_by="test_several_optimizers_share_one_scale",
        says="other weights",
        edits=(("if not self._overflow[id(optimizer)]:", "if not any(self._overflow.values()):"),),
    ),
    Wrong(
        name="grows_without_end",
        belief="A larger scale is always better.",
        caught_by="test_does_not_grow_out_of_float32",
        says="grows without end",
        edits=(
            (
                "                if grown <= torch.finfo(torch.float32).max:\n                    self",
                "                self",
            ),
        ),
    ),
    Wrong(
        name="saves_the_scale_only",
        belief="The scale is all the state there is.",
        caught_by="test_its_state_goes_on_where_it_was[own]",
        says="a number is missing",
        edits=(('        self._good_steps = state_dict["_growth_tracker"]\n', ""),),
    ),
    Wrong(
        name="joins_all_gradients_to_look_at_them",
        belief="One long tensor is the fast way to look for infinities.",
        caught_by="test_works_in_place",
        says="joined into one long tensor",
        edits=(
            (
                "        largest = get_total_norm(grads, math.inf)\n",
                "        largest = torch.cat([g.flatten() for g in grads]).abs().max()\n",
            ),
        ),
    ),
    Wrong(
        name="unscales_as_often_as_asked",
        belief="Unscaling again does no harm.",
        caught_by="test_unscales_once_between_two_updates",
        says="second unscale_()",
        edits=(
            (
                "        if id(optimizer) in self._overflow:\n            raise RuntimeError("
                '"unscale_() was called for this optimizer since the last update()")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="scales_with_a_python_number",
        belief="A number times a tensor is as good as a tensor times a tensor.",
        caught_by="test_scales_a_float16_loss_in_float32",
        says="does not widen",
        edits=(
            (
                "return outputs * torch.tensor(self._scale, device=outputs.device)",
                "return outputs * self._scale",
            ),
        ),
    ),
    Wrong(
        name="starts_with_a_scale_of_one",
        belief="A scale should start low and grow.",
        caught_by="test_starts_as_gradscaler_starts",
        says="the defaults are others",
        edits=(("init_scale: float = 2.0**16,", "init_scale: float = 1.0,"),),
    ),
    Wrong(
        name="unscales_float16_gradients",
        belief="A gradient is a gradient.",
        caught_by="test_refuses_float16_gradients",
        says="this input is not checked",
        edits=(("if any(grad.dtype == torch.float16 for grad in grads):", "if False:"),),
    ),
    Wrong(
        name="every_parameter_has_a_gradient",
        belief="After backward every parameter has a gradient.",
        caught_by="test_minds_parameters_without_a_gradient",
        says="NoneType",
        raises=AttributeError,
        edits=(
            (
                'grads = [p.grad for g in optimizer.param_groups for p in g["params"] '
                "if p.grad is not None]",
                'grads = [p.grad for g in optimizer.param_groups for p in g["params"]]',
            ),
        ),
    ),
    Wrong(
        name="any_options_will_do",
        belief="Nobody sets a growth factor of 1.",
        caught_by="test_refuses_bad_options[growth_of_1]",
        says="this input is not checked",
        edits=(("if not growth_factor > 1:", "if not growth_factor > 0:"),),
    ),
    Wrong(
        name="needs_more_of_a_scaler_than_it_names",
        belief="Every scaler is a GradScaler.",
        caught_by="test_train_step_takes_it_as_it_takes_gradscaler",
        says="is_enabled",
        raises=AttributeError,
        edits=(
            (
                "    scale = scaler.get_scale()\n",
                "    scale = scaler.get_scale() if scaler.is_enabled() else 1.0\n",
            ),
        ),
    ),
    # Part 3
    Wrong(
        name="trains_on_the_first_batch_only",
        belief="return inside the loop.",
        caught_by="test_returns_a_result_for_each_batch_and_learns",
        says="one for each batch",
        edits=(
            ("        results.append(result)\n", "        results.append(result)\n        break\n"),
        ),
    ),
    Wrong(
        name="the_scheduler_advances_on_skipped_steps",
        belief="A scheduler counts batches.",
        caught_by="test_the_scheduler_stays_where_it_is_after_a_skipped_step",
        says="advances for every batch",
        edits=(("if scheduler is not None and not result.skipped:", "if scheduler is not None:"),),
    ),
    Wrong(
        name="saves_no_random_state",
        belief="Weights and optimizer are the state of training.",
        caught_by="test_resumes_to_the_same_bits",
        says="something is not saved",
        edits=(
            (
                '    torch.set_rng_state(state["random"])  # dropout goes on from the same draw\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="saves_no_scale",
        belief="The scale finds itself again.",
        caught_by="test_resumes_to_the_same_bits[fp16]",
        says="something is not saved",
        edits=(
            (
                '    if scaler is not None:\n        scaler.load_state_dict(state["scaler"])\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="saves_no_optimizer_state",
        belief="Adam warms up again in a few steps.",
        caught_by="test_resumes_to_the_same_bits",
        says="something is not saved",
        edits=(
            ('    optimizer.load_state_dict(state["optimizer"])\n    if scaler', "    if scaler"),
        ),
    ),
    Wrong(
        name="trains_16_bit_weights",
        belief="Weights in 16 bits learn as well as in 32.",
        caught_by="test_learns_real_text_as_well_as_float32",
        says="loss on text",
        edits=(
            (
                "        results.append(result)\n",
                "        for p in model.parameters():\n            p.data = p.data.to(dtype).float()\n"
                "        results.append(result)\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_every_batch",
        belief="A batch that was used is free.",
        caught_by="test_memory_does_not_grow_with_the_number_of_steps",
        says="something else of every step is",
        edits=(
            ("    results = []\n", "    results, used = [], []\n"),
            (
                "        results.append(result)\n",
                "        results.append(result)\n        used.append(batch)\n",
            ),
        ),
    ),
    Wrong(
        name="drains_the_batches_first",
        belief="A list of the batches is needed for their number.",
        caught_by="test_takes_batches_one_at_a_time",
        says="drained into a list",
        edits=(("    for batch in batches:\n", "    for batch in list(batches):\n"),),
    ),
    Wrong(
        name="writes_the_checkpoint_in_place",
        belief="torch.save either works or does not.",
        caught_by="test_a_failed_save_leaves_the_checkpoint_before_it",
        says="written in place",
        edits=(
            (
                "        torch.save(state, partial)\n        os.replace(partial, path)\n",
                "        torch.save(state, path)\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_the_partial_file",
        belief="A partial file does no harm.",
        caught_by="test_a_failed_save_leaves_the_checkpoint_before_it",
        says="a partial file is left behind",
        edits=(
            (
                "    finally:\n        partial.unlink(missing_ok=True)\n",
                "    finally:\n        pass\n",
            ),
        ),
    ),
    Wrong(
        name="loads_what_is_there",
        belief="A part that was not saved can keep its state.",
        caught_by="test_refuses_to_load_what_was_not_saved",
        says="this input is not checked",
        edits=(
            ("        if (state[name] is None) != (given is None):\n", "        if False:\n"),
            (
                "    if scaler is not None:\n        scaler.load",
                "    if scaler and state['scaler']:\n        scaler.load",
            ),
            (
                "    if scheduler is not None:\n        scheduler.load",
                "    if scheduler and state['scheduler']:\n        scheduler.load",
            ),
        ),
    ),
    # Part 4
    Wrong(
        name="steps_the_16_bit_weights",
        belief="An optimizer over 16-bit weights is enough if the learning rate is right.",
        caught_by="test_learns_from_updates_too_small_for_sixteen_bits",
        says="masters are rounded on the way",
        edits=(
            (
                "                weight.copy_(master)\n        self.optimizer.zero_grad",
                "                weight.copy_(master)\n                master.copy_(weight)\n"
                "        self.optimizer.zero_grad",
            ),
        ),
    ),
    Wrong(
        name="masters_rounded_to_the_other_16_bit_type",
        belief="float16 and bfloat16 are both half of float32.",
        caught_by="test_is_float32_training_rounded[fp16]",
        says="masters start from",
        edits=(
            (
                "[p.detach().float().requires_grad_()",
                "[p.detach().bfloat16().float().requires_grad_()",
            ),
        ),
    ),
    Wrong(
        name="divides_by_the_scale_in_16_bits",
        belief="The order of widening and dividing does not matter.",
        caught_by="test_divides_by_the_loss_scale_in_float32",
        says="divided in 16 bits",
        edits=(("weight.grad.float() / loss_scale", "(weight.grad / loss_scale).float()"),),
    ),
    Wrong(
        name="keeps_float32_gradients",
        belief="Gradients of the masters are overwritten anyway.",
        caught_by="test_holds_sixteen_bytes_a_parameter",
        says="float32 gradients are kept",
        edits=(
            (
                "        self.optimizer.zero_grad()\n        return taken",
                "        return taken",
            ),
        ),
    ),
    Wrong(
        name="steps_before_looking",
        belief="The check can come after the step.",
        caught_by="test_an_overflow_moves_nothing_and_is_told",
        says="they changed",
        edits=(
            (
                "        if taken:\n            self.optimizer.step()\n",
                "        self.optimizer.step()\n        if taken:\n",
            ),
        ),
    ),
    Wrong(
        name="copies_frozen_weights_too",
        belief="Every 16-bit weight needs a master.",
        caught_by="test_copies_no_frozen_and_one_tied_parameter",
        says="frozen parameters need no master",
        edits=(
            (
                "{name: p for name, p in model.named_parameters() if p.requires_grad}",
                "dict(model.named_parameters())",
            ),
        ),
    ),
    Wrong(
        name="takes_a_missing_gradient_for_the_last_one",
        belief="A parameter that was not used keeps its gradient.",
        caught_by="test_a_weight_without_a_gradient_stays_where_it_is",
        says="earlier step",
        edits=(
            (
                "        self.optimizer.zero_grad()\n        return taken",
                "        return taken",
            ),
        ),
    ),
    Wrong(
        name="zero_grad_drops_the_wrong_gradients",
        belief="zero_grad is for the optimizer's parameters.",
        caught_by="test_a_weight_without_a_gradient_stays_where_it_is",
        says="zero_grad leaves 16-bit gradients",
        edits=(
            (
                "        for weight in self._weights:\n            weight.grad = None\n",
                "        self.optimizer.zero_grad()\n",
            ),
        ),
    ),
    Wrong(
        name="makes_masters_anew_from_the_16_bit_weights",
        belief="Masters can be made again from the weights.",
        caught_by="test_resumes_from_the_masters_not_from_their_rounding",
        says="made anew from 16-bit weights",
        edits=(
            (
                "            master.copy_(value)\n            weight.copy_(master)\n",
                "            weight.copy_(value)\n            master.copy_(weight)\n",
            ),
        ),
    ),
    Wrong(
        name="trains_a_float32_model",
        belief="Masters of float32 weights do no harm.",
        caught_by="test_refuses_bad_input[float32]",
        says="this input is not checked",
        edits=(("if p.dtype not in (torch.float16, torch.bfloat16):", "if False:"),),
    ),
    # What a reader of the specs found that they accepted.
    Wrong(
        name="norm_first_group",
        belief="The optimizer has one parameter group.",
        caught_by="test_looks_at_every_parameter_group",
        says="only param_groups[0]",
        edits=(
            (
                '[p for group in optimizer.param_groups for p in group["params"]]\n\n',
                'list(optimizer.param_groups[0]["params"])\n\n',
            ),
        ),
    ),
    Wrong(
        name="model_zero_grad",
        belief="model.zero_grad() and optimizer.zero_grad() are the same.",
        caught_by="test_clears_the_gradients_of_all_that_it_trains",
        says="model.zero_grad()",
        edits=(("    optimizer.zero_grad()\n    mixed", "    model.zero_grad()\n    mixed"),),
    ),
    Wrong(
        name="zero_not_none",
        belief="A zero gradient is no gradient.",
        caught_by="test_does_not_step_a_parameter_that_got_no_gradient",
        says="zeros are a gradient too",
        edits=(
            (
                "    optimizer.zero_grad()\n    mixed",
                "    optimizer.zero_grad(set_to_none=False)\n    mixed",
            ),
        ),
    ),
    Wrong(
        name="skip_nonfinite_without_scaler",
        belief="A bad step is better skipped, scaler or not.",
        caught_by="test_skips_nothing_without_a_scaler",
        says="taken for a skipped step",
        edits=(
            (
                "        optimizer.step()\n        return StepResult(loss.detach().float(), grad_norm, skipped=False)",
                "        finite = bool(grad_norm.isfinite())\n        if finite:\n            optimizer.step()\n        return StepResult(loss.detach(), grad_norm, skipped=not finite)",
            ),
        ),
    ),
    Wrong(
        name="norm_as_float",
        belief="The norm is for the log, so a number will do.",
        caught_by="test_moves_every_weight_and_returns_the_true_loss",
        says="grad_norm as a float32 tensor",
        edits=(
            (
                "    scale = scaler.get_scale()\n",
                "    grad_norm = grad_norm.item()\n    scale = scaler.get_scale()\n",
            ),
            (
                "return StepResult(loss.detach().float(), grad_norm, skipped=False)",
                "return StepResult(loss.detach(), grad_norm.item(), skipped=False)",
            ),
        ),
    ),
    Wrong(
        name="norm_as_float64",
        belief="More precision never hurts.",
        caught_by="test_moves_every_weight_and_returns_the_true_loss",
        says="grad_norm as a float32 tensor",
        edits=(
            (
                "grad_norm = _total_norm(gradients)\n",
                "grad_norm = _total_norm(gradients).double()\n",
            ),
        ),
    ),
    Wrong(
        name="skip_by_all_weights",
        belief="A step that was taken has moved something.",
        caught_by="test_a_step_of_length_zero_is_not_skipped",
        says="did not move",
        edits=(
            (
                "    scale = scaler.get_scale()\n    scaler.step",
                "    before = [p.detach().clone() for p in parameters]\n    scaler.step",
            ),
            (
                "skipped=scaler.get_scale() < scale",
                "skipped=all(torch.equal(a, b) for a, b in zip(before, parameters))",
            ),
        ),
    ),
    Wrong(
        name="casts_inputs",
        belief="Inputs belong in the dtype of the computation.",
        caught_by="test_leaves_the_inputs_in_float32",
        says="cast by hand",
        edits=(
            (
                "        loss = loss_fn(model(inputs).float(), targets)\n",
                "        if inputs.is_floating_point():\n            inputs = inputs.to(dtype)\n"
                "        loss = loss_fn(model(inputs).float(), targets)\n",
            ),
        ),
    ),
    Wrong(
        name="autocast_left_on_after_error",
        belief="Entering and leaving by hand is the same as `with`.",
        caught_by="test_an_error_in_the_model_leaves_autocast_off",
        says="by hand",
        edits=(
            (
                "    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):\n"
                "        # float() because a float16 loss times a scale of 65536 is infinite. No name for the output:\n"
                "        # it would live through the backward pass.\n"
                "        loss = loss_fn(model(inputs).float(), targets)\n",
                "    cast = torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed)\n    cast.__enter__()\n"
                "    loss = loss_fn(model(inputs).float(), targets)\n    cast.__exit__(None, None, None)\n",
            ),
        ),
    ),
    Wrong(
        name="only_tuples",
        belief="A batch is a tuple.",
        caught_by="test_takes_a_list_for_a_pair_and_a_loss_in_16_bits",
        says="list",
        raises=ValueError,
        edits=(
            (
                "isinstance(batch, (tuple, list))",
                "isinstance(batch, tuple)",
            ),
        ),
    ),
    Wrong(
        name="unscale_first_group",
        belief="The optimizer has one parameter group.",
        caught_by="test_unscales_every_parameter_group",
        says="only param_groups[0]",
        edits=(
            (
                '[p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]',
                '[p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]',
            ),
        ),
    ),
    Wrong(
        name="counts_steps_not_updates",
        belief="Every step of an optimizer is a good step.",
        caught_by="test_counts_updates_and_falls_once_for_all_optimizers",
        says="are counted, not updates",
        edits=(
            (
                "            self._good_steps += 1\n            if self._good_steps == self",
                "            if self._good_steps >= self",
            ),
            (
                "            optimizer.step()\n        self._stepped",
                "            optimizer.step()\n            self._good_steps += 1\n        self._stepped",
            ),
        ),
    ),
    Wrong(
        name="backs_off_for_each",
        belief="Two overflows are twice as bad as one.",
        caught_by="test_counts_updates_and_falls_once_for_all_optimizers",
        says="are counted, not updates",
        edits=(
            (
                "            self._scale *= self._backoff_factor\n",
                "            for bad in self._overflow.values():\n                if bad:\n                    self._scale *= self._backoff_factor\n",
            ),
        ),
    ),
    Wrong(
        name="update_needs_a_step",
        belief="update() follows step().",
        caught_by="test_an_overflow_counts_without_a_step",
        says="nothing to go by",
        raises=RuntimeError,
        edits=(
            (
                '        if not self._overflow:\n            raise RuntimeError("update()',
                '        if not self._stepped:\n            raise RuntimeError("update()',
            ),
        ),
    ),
    Wrong(
        name="sum_trick_scaler",
        belief="A sum is finite if and only if its terms are.",
        caught_by="test_huge_but_finite_gradients_are_no_overflow",
        says="the sum or the norm",
        edits=(
            (
                "get_total_norm(grads, math.inf)",
                "torch.stack([grad.sum() for grad in grads]).abs().max()",
            ),
        ),
    ),
    Wrong(
        name="refuses_all_but_float32",
        belief="Gradients of a float32 model are float32.",
        caught_by="test_takes_float64_gradients",
        says="a gradient is float16",
        raises=ValueError,
        edits=(
            (
                "if any(grad.dtype == torch.float16 for grad in grads)",
                "if any(grad.dtype != torch.float32 for grad in grads)",
            ),
        ),
    ),
    Wrong(
        name="state_of_tensors",
        belief="A scale belongs on the device, and so does its state.",
        caught_by="test_its_state_is_plain_numbers",
        says="changes with the scaler",
        edits=(
            (
                "        self._scale = init_scale\n",
                "        self._scale = torch.tensor(float(init_scale))\n",
            ),
            ("        return self._scale\n", "        return self._scale.item()\n"),
            ("torch.tensor(self._scale, device=outputs.device)", "self._scale.to(outputs.device)"),
            (
                "            self._scale *= self._backoff_factor",
                "            self._scale.mul_(self._backoff_factor)",
            ),
            (
                "                    self._scale = grown",
                "                    self._scale.copy_(grown)",
            ),
            (
                '        self._scale = state_dict["scale"]',
                '        self._scale = torch.as_tensor(state_dict["scale"])',
            ),
        ),
    ),
    Wrong(
        name="nan_options",
        belief="x <= 0 refuses all that is not positive.",
        caught_by="test_refuses_bad_options[nan_scale]",
        says="not checked",
        edits=(
            ("if not 0 < init_scale < math.inf", "if init_scale <= 0 or init_scale == math.inf"),
            ("if not growth_factor > 1", "if growth_factor <= 1"),
            ("if not 0 < backoff_factor < 1", "if backoff_factor <= 0 or backoff_factor >= 1"),
        ),
    ),
    Wrong(
        name="train_forgets_max_norm",
        belief="Clipping is train_step's business.",
        caught_by="test_hands_max_norm_on",
        says="does not hand it on",
        edits=(
            ("scaler, dtype=dtype, max_norm=max_norm\n        )", "scaler, dtype=dtype\n        )"),
        ),
    ),
    Wrong(
        name="scheduler_only_with_scaler",
        belief="The schedule matters under AMP only.",
        caught_by="test_the_scheduler_advances_without_a_scaler_too",
        says="waits for a scaler",
        edits=(
            (
                "if scheduler is not None and not result",
                "if scheduler is not None and scaler is not None and not result",
            ),
        ),
    ),
    Wrong(
        name="train_skips_empty_batches",
        belief="An empty batch can be passed over.",
        caught_by="test_stops_at_a_bad_batch_and_keeps_the_steps_before_it",
        says="not checked",
        edits=(
            (
                "    for batch in batches:\n",
                "    for batch in batches:\n        if len(batch[0]) == 0:\n            continue\n",
            ),
        ),
    ),
    Wrong(
        name="path_with_suffix",
        belief="A path is a pathlib.Path.",
        caught_by="test_a_failed_first_save_leaves_nothing",
        says="with_suffix",
        raises=AttributeError,
        edits=(
            (
                'partial = Path(f"{os.fspath(path)}.partial")',
                'partial = path.with_suffix(".partial")',
            ),
        ),
    ),
    Wrong(
        name="cleans_up_after_oserror_only",
        belief="A save fails with an OSError.",
        caught_by="test_a_failed_first_save_leaves_nothing[RuntimeError]",
        says="half a file is left",
        edits=(
            (
                "    try:\n        torch.save(state, partial)\n        os.replace(partial, path)\n    finally:\n        partial.unlink(missing_ok=True)\n",
                "    try:\n        torch.save(state, partial)\n        os.replace(partial, path)\n    except OSError:\n        partial.unlink(missing_ok=True)\n        raise\n",
            ),
        ),
    ),
    Wrong(
        name="backup_and_restore",
        belief="Moving the old file away keeps it safe.",
        caught_by="test_a_failed_first_save_leaves_nothing",
        says="half a file is left",
        edits=(
            (
                "    try:\n        torch.save(state, partial)\n        os.replace(partial, path)\n    finally:\n        partial.unlink(missing_ok=True)\n",
                "    if os.path.exists(path):\n        os.replace(path, partial)\n    try:\n        torch.save(state, path)\n    except BaseException:\n        if partial.exists():\n            os.replace(partial, path)\n        raise\n    partial.unlink(missing_ok=True)\n",
            ),
        ),
    ),
    Wrong(
        name="loads_while_checking",
        belief="Each part can be loaded when it has been checked.",
        caught_by="test_a_refused_load_changes_nothing",
        says="still to be checked",
        edits=(
            (
                'was given")\n    model',
                'was given")\n        if given is not None:\n            given.load_state_dict(state[name])\n    model',
            ),
        ),
    ),
    Wrong(
        name="random_before_check",
        belief="The random state can go first.",
        caught_by="test_a_refused_load_changes_nothing",
        says="random state",
        edits=(
            (
                '    for name, given in (("scaler", scaler)',
                '    torch.set_rng_state(state["random"])\n    for name, given in (("scaler", scaler)',
            ),
        ),
    ),
    Wrong(
        name="zip_strict_is_the_check",
        belief="zip(strict=True) counts for me.",
        caught_by="test_a_state_with_another_number_of_masters_changes_nothing[too_few]",
        says="checked too late",
        edits=(
            (
                '        if len(saved) != len(self.masters):\n            raise ValueError(f"{len(saved)} masters were saved, and there are {len(self.masters)}")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="loss_scale_inf_nan",
        belief="A scale that is not negative is fine.",
        caught_by="test_refuses_bad_input[infinite]",
        says="not checked",
        edits=(("if not 0 < loss_scale < math.inf", "if loss_scale <= 0"),),
    ),
    Wrong(
        name="checks_first_dtype",
        belief="The first parameter tells the dtype of the model.",
        caught_by="test_looks_at_the_dtype_of_every_trainable_parameter_and_of_no_other",
        says="not checked",
        edits=(
            (
                "        for name, p in trainable.items():\n",
                "        for name, p in list(trainable.items())[:1]:\n",
            ),
        ),
    ),
    Wrong(
        name="checks_frozen_dtype",
        belief="All parameters have one dtype, frozen ones too.",
        caught_by="test_looks_at_the_dtype_of_every_trainable_parameter_and_of_no_other",
        says="1.weight must be float16",
        raises=ValueError,
        edits=(
            (
                "        for name, p in trainable.items():\n",
                "        for name, p in model.named_parameters():\n",
            ),
        ),
    ),
    Wrong(
        name="returns_early_on_overflow",
        belief="After an overflow there is nothing left to do.",
        caught_by="test_float32_gradients_go_after_an_overflow_too",
        says="returns early",
        edits=(
            (
                "        if taken:\n            self.optimizer.step()\n            for weight, master in zip(self._weights, self.masters, strict=True):\n                weight.copy_(master)\n",
                "        if not taken:\n            return False\n        self.optimizer.step()\n        for weight, master in zip(self._weights, self.masters, strict=True):\n            weight.copy_(master)\n",
            ),
        ),
    ),
    Wrong(
        name="norm_trick_master",
        belief="A norm is finite if and only if its gradient is.",
        caught_by="test_huge_but_finite_gradients_are_a_step",
        says="the sum or the norm",
        edits=(
            (
                "all(bool(grad.isfinite().all()) for grad in grads)",
                "all(bool(grad.norm().isfinite()) for grad in grads)",
            ),
        ),
    ),
    Wrong(
        name="load_aliases_masters",
        belief="A loaded tensor can be used as it is.",
        caught_by="test_a_loaded_trainer_is_one_of_its_own",
        says="not copies of them",
        edits=(
            (
                "            master.copy_(value)\n            weight",
                "            master.data = value.data\n            weight",
            ),
        ),
    ),
    Wrong(
        name="saves_state_without_groups",
        belief="The optimizer's state is its tensors.",
        caught_by="test_a_loaded_trainer_is_one_of_its_own",
        says="not its groups",
        edits=(
            (
                '"optimizer": self.optimizer.state_dict()}\n',
                '"optimizer": {"state": self.optimizer.state_dict()["state"]}}\n',
            ),
            (
                'self.optimizer.load_state_dict(state_dict["optimizer"])\n',
                'self.optimizer.load_state_dict({**self.optimizer.state_dict(), **state_dict["optimizer"]})\n',
            ),
        ),
    ),
    # Found by adversaries
    Wrong(
        name="returns_before_update_on_a_bad_loss",
        belief="A loss that is not finite ends the step: nothing more is to be done.",
        caught_by="x",
        says="x",
        edits=(
            (
                "        scaler.scale(loss).backward()\n",
                "        if not loss.isfinite():\n            return StepResult(loss.detach().float(), loss.detach().float(), skipped=True)\n        scaler.scale(loss).backward()\n",
            ),
        ),
    ),
    Wrong(
        name="switches_autocast_off_by_hand",
        belief="After the forward pass autocast is off, so it can be set to off.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    # Outside autocast: backward",
                "    torch.set_autocast_enabled(inputs.device.type, False)\n    # Outside autocast: backward",
            ),
        ),
    ),
    Wrong(
        name="no_autocast_block_for_float32",
        belief="Without a block around it the model computes in float32.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    with torch.autocast(inputs.device.type, dtype=dtype, enabled=mixed):\n",
                "    with torch.autocast(inputs.device.type, dtype=dtype) if mixed else torch.enable_grad():\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_a_hook_on_the_optimizer",
        belief="A hook that counts steps does no harm.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    optimizer.zero_grad()\n    mixed",
                "    optimizer.zero_grad()\n    optimizer.register_step_post_hook(lambda *_: None)\n    mixed",
            ),
        ),
    ),
    Wrong(
        name="seeds_each_step",
        belief="A seed makes a step reproducible.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    optimizer.zero_grad()\n    mixed",
                "    optimizer.zero_grad()\n    torch.manual_seed(0)\n    mixed",
            ),
        ),
    ),
    Wrong(
        name="the_scale_stops_at_one",
        belief="A scale below 1 makes no sense.",
        caught_by="x",
        says="x",
        edits=(
            (
                "            self._scale *= self._backoff_factor\n",
                "            self._scale = max(1.0, self._scale * self._backoff_factor)\n",
            ),
        ),
    ),
    Wrong(
        name="steps_again_after_an_overflow",
        belief="A step that was skipped can be tried once more.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    scaler.step(optimizer)\n    scaler.update()\n",
                "    scaler.step(optimizer)\n    scaler.update()\n    if scaler.get_scale() < scale:\n        optimizer.step()\n",
            ),
        ),
    ),
    Wrong(
        name="the_saved_state_is_the_scaler_itself",
        belief="vars() gives the state.",
        caught_by="x",
        says="x",
        edits=(
            (
                '        return {\n            "scale": self._scale,',
                '        self.__dict__.setdefault("_live", {}).update(scale=self._scale, growth_factor=self._growth_factor, backoff_factor=self._backoff_factor, growth_interval=self._growth_interval, _growth_tracker=self._good_steps)\n        return self._live\n        return {\n            "scale": self._scale,',
            ),
        ),
    ),
    Wrong(
        name="serialises_in_memory_and_writes_in_place",
        belief="What can fail is the pickling; a write of bytes does not.",
        caught_by="x",
        says="x",
        edits=(
            (
                "        torch.save(state, partial)\n        os.replace(partial, path)\n",
                "        import io\n\n        buffer = io.BytesIO()\n        torch.save(state, buffer)\n        Path(path).write_bytes(buffer.getvalue())\n",
            ),
        ),
    ),
    Wrong(
        name="restores_parameters_only",
        belief="A model is its parameters.",
        caught_by="x",
        says="x",
        edits=(
            (
                '    model.load_state_dict(state["model"])\n',
                '    with torch.no_grad():\n        for name, parameter in model.named_parameters():\n            parameter.copy_(state["model"][name])\n',
            ),
        ),
    ),
    Wrong(
        name="steps_the_schedule_first",
        belief="The schedule sets the rate of the step that follows.",
        caught_by="x",
        says="x",
        edits=(
            (
                "        result = train_step(\n",
                "        if scheduler is not None:\n            scheduler.step()\n        result = train_step(\n",
            ),
            (
                "        if scheduler is not None and not result.skipped:\n            scheduler.step()\n",
                "",
            ),
        ),
    ),
    Wrong(
        name="drops_16_bit_gradients_after_a_step",
        belief="Gradients that were used can go.",
        caught_by="x",
        says="x",
        edits=(
            (
                "        self.optimizer.zero_grad()\n        return taken\n",
                "        self.optimizer.zero_grad()\n        self.zero_grad()\n        return taken\n",
            ),
        ),
    ),
    Wrong(
        name="looks_before_dividing",
        belief="A scaled gradient is finite if and only if the true one is.",
        caught_by="x",
        says="x",
        edits=(
            ("        for grad in grads:\n            grad.mul_(1.0 / self._scale)\n", ""),
            (
                "        self._overflow[id(optimizer)] = not largest.isfinite()\n",
                "        self._overflow[id(optimizer)] = not largest.isfinite()\n        for grad in grads:\n            grad.mul_(1.0 / self._scale)\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_output_by_name",
        belief="A local name costs nothing.",
        caught_by="x",
        says="x",
        edits=(
            (
                "        loss = loss_fn(model(inputs).float(), targets)\n",
                "        output = model(inputs)\n        loss = loss_fn(output.float(), targets)\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_float32_output_by_name",
        belief="A local name costs nothing, whatever its dtype.",
        caught_by="x",
        says="x",
        edits=(
            (
                "        loss = loss_fn(model(inputs).float(), targets)\n",
                "        output = model(inputs).float()\n        loss = loss_fn(output, targets)\n",
            ),
        ),
    ),
    Wrong(
        name="calls_train_in_the_step",
        belief="A training step is in train mode.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    optimizer.zero_grad()\n    mixed",
                "    optimizer.zero_grad()\n    model.train()\n    mixed",
            ),
        ),
    ),
    Wrong(
        name="the_norm_overflows",
        belief="A 2-norm of finite numbers is finite.",
        caught_by="x",
        says="x",
        edits=(("grad_norm = _total_norm(gradients)", "grad_norm = get_total_norm(gradients)"),),
    ),
    Wrong(
        name="takes_any_two_things_for_a_pair",
        belief="What unpacks into two is a pair.",
        caught_by="x",
        says="x",
        edits=(
            (
                '    if not isinstance(batch, (tuple, list)) or len(batch) != 2:\n        raise ValueError(f"batch must be a pair of tensors, not {type(batch).__name__}")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="clips_to_infinity_where_nothing_is_asked",
        belief="Clipping to an infinite norm does nothing.",
        caught_by="x",
        says="x",
        edits=(
            (
                "    if max_norm is not None:\n        clip_grads_with_norm_(parameters, max_norm, grad_norm)\n",
                "    limit = math.inf if max_norm is None else max_norm\n    clip_grads_with_norm_(parameters, limit, grad_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="a_model_without_parameters_is_fine",
        belief="torch's own error says enough.",
        caught_by="x",
        says="x",
        edits=(
            (
                '        if not trainable:\n            raise ValueError(f"{type(model).__name__} has no trainable parameter")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="draws_a_random_number_in_a_save",
        belief="A name of its own for the partial file needs a random number.",
        caught_by="x",
        says="x",
        edits=(
            (
                '    partial = Path(f"{os.fspath(path)}.partial")\n',
                '    partial = Path(f"{os.fspath(path)}.{torch.randint(9, (1,)).item()}")\n',
            ),
        ),
    ),
]
