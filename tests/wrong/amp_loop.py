"""Mistakes in amp_loop, each with the spec that must catch it."""

from kit.answers import Wrong

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
                "StepResult(loss.detach(), grad_norm, skipped=False)",
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
                "        loss = loss_fn(output.float(), targets)\n",
                "        loss = loss_fn(output.float(), targets)\n"
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
                "        loss = loss_fn(output.float(), targets)\n",
                "    loss = loss_fn(output.float(), targets)\n",
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
        says="taken before unscale_",
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
        edits=(("loss_fn(output.float(), targets)", "loss_fn(output, targets)"),),
    ),
    Wrong(
        name="the_loss_turned_to_float32_too_late",
        belief="loss.float() is enough against overflow.",
        caught_by="test_a_float16_loss_does_not_overflow_the_first_step",
        says="its scaled gradient starts out infinite",
        edits=(("loss_fn(output.float(), targets)", "loss_fn(output, targets).float()"),),
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
        says="not gradient / scale",
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
        edits=(("grad.isfinite().logical_not().sum()", "grad.isinf().sum()"),),
    ),
    Wrong(
        name="looks_at_the_first_gradient",
        belief="If one overflows, the first does.",
        caught_by="test_one_bad_gradient_anywhere_stops_everything[inf]",
        says="not every element",
        edits=(
            (
                "logical_not().sum() for grad in grads)",
                "logical_not().sum() for grad in grads[:1])",
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
                "bad = sum(grad.isfinite().logical_not().sum() for grad in grads)",
                "bad = not torch.cat([g.flatten() for g in grads]).isfinite().all() if grads else 0",
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
        says="scaler",
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
]
