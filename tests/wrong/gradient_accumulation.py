"""Mistakes in gradient_accumulation, each with the spec that must catch it."""

from kit.answers.loading import Wrong

# Part 1: the loop of accumulate, and what stands before it.
CHECK_1 = """    for batch in micro_batches:
        _check_batch(batch)
    samples"""
HEAD_1 = """    optimizer.zero_grad()
    shares = []
    for inputs, targets in micro_batches:
        # The share of the samples"""
LOSS_1 = "        loss = loss_fn(model(inputs), targets) * (len(inputs) / samples)\n"
BACKWARD_1 = """        # Backward at once, so that this graph is gone before the next one is built.
        loss.backward()
"""
TAIL_1 = (
    BACKWARD_1
    + """        shares.append(loss.detach())
    optimizer.step()
    return torch.stack(shares).sum()
"""
)
LOOP_1 = LOSS_1 + TAIL_1
PAIR = "    if not isinstance(batch, (tuple, list)) or len(batch) != 2:\n"
HELD = '    held = [p for g in optimizer.param_groups for p in g["params"]]\n'

# Part 2
HEAD_2 = """    optimizer.zero_grad()
    shares = []
    for inputs, targets in micro_batches:
        loss = _sum"""
LOSS_2 = "        loss = _sum_over_tokens(model(inputs), targets, ignore_index) / tokens\n"
LOOP_2 = (
    LOSS_2
    + """        loss.backward()
        shares.append(loss.detach())
    optimizer.step()
    return torch.stack(shares).sum()
"""
)
TOKENS_PAIR = """    inputs, targets = _pair(batch)
    if inputs.shape"""
CROSS_ENTROPY = """    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
"""
NO_TOKENS = """    if tokens == 0:
        raise ValueError(f"{len(micro_batches)} micro-batches with {tokens} labelled tokens")
"""

# Part 3
WINDOWS = "    while batches := list(itertools.islice(iterator, window)):\n"
FULL = "    global FULL\n    FULL = window\n"
FORWARD_3 = """            with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
                output = model(inputs)
                loss = loss_fn(output.float(), targets) * (len(inputs) / samples)
"""
BACKWARD_3 = """            # Every micro-batch under the same scale: it may not change before the window's end.
            (loss if scaler is None else scaler.scale(loss)).backward()
"""
SHARE_3 = "            shares.append(loss.detach().float())\n"
UNSCALE_3 = """        if scaler is not None:
            scaler.unscale_(optimizer)  # once: the gradients are whole now
"""
NORM_3 = """        grad_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
"""
CLIP_3 = """        if max_norm is not None:
            clip_grads_with_norm_(parameters, max_norm, grad_norm)
"""
FINALLY_3 = """    finally:
        optimizer.zero_grad()
"""
SCHEDULE_3 = """        if scheduler is not None and not result.skipped:
            scheduler.step()
"""
STEP_3 = """    scaler.step(optimizer)
    scaler.update()
"""

STEPPED_3 = "        skipped = _step(optimizer, scaler)\n"

# Part 4
LOOP_4 = """        with model.no_sync() if number < len(micro_batches) else nullcontext():
            loss = _sum_over_tokens(model(inputs), targets, ignore_index) / all_tokens
            # DDP divides the sum over ranks by their number. That is not ours: multiply it away.
            (loss * ranks).backward()
        shares.append(loss.detach())
    optimizer.step()
    return torch.stack(shares).sum()
"""
HEAD_4 = """    optimizer.zero_grad()
    shares = []
    for number"""
PROBLEM_4 = "        problem = error  # not raised yet: the others wait in the all-reduce below\n"
REDUCE_4 = "    dist.all_reduce(counts, group=model.process_group)\n"

WRONG = [
    # Part 1
    Wrong(
        name="steps_in_the_window",
        belief="After backward() comes step().",
        caught_by="test_steps_once_and_returns_the_mean_loss",
        says="a step for each micro-batch",
        edits=((BACKWARD_1, BACKWARD_1 + "        optimizer.step()\n"),),
    ),
    Wrong(
        name="never_steps",
        belief="The caller steps, as after backward().",
        caught_by="test_steps_once_and_returns_the_mean_loss",
        says="optimizer steps",
        edits=((LOOP_1, LOOP_1.replace("    optimizer.step()\n", "")),),
    ),
    Wrong(
        name="returns_the_loss_with_its_graph",
        belief="A scalar is small, so it can be kept.",
        caught_by="test_steps_once_and_returns_the_mean_loss",
        says="without a graph",
        edits=((LOOP_1, LOOP_1.replace("loss.detach()", "loss")),),
    ),
    Wrong(
        name="returns_a_python_number",
        belief="item() is how a loss is returned.",
        caught_by="test_steps_once_and_returns_the_mean_loss",
        says="the loss as a tensor",
        edits=((LOOP_1, LOOP_1.replace("sum()\n", "sum().item()\n")),),
    ),
    Wrong(
        name="returns_the_mean_of_the_means",
        belief="Gradients need the shares; for the printed loss the mean of the losses will do.",
        caught_by="test_steps_once_and_returns_the_mean_loss",
        says="it is the mean of the micro-batches' means",
        edits=(
            (
                LOOP_1,
                LOOP_1.replace(
                    "shares.append(loss.detach())",
                    "shares.append(loss.detach() * samples / len(inputs) / len(micro_batches))",
                ),
            ),
        ),
    ),
    Wrong(
        name="returns_the_last_loss",
        belief="The loss of a step is the loss of its last backward pass.",
        caught_by="test_steps_once_and_returns_the_mean_loss",
        says="the last micro-batch's share only",
        edits=((LOOP_1, LOOP_1.replace("torch.stack(shares).sum()", "loss.detach()")),),
    ),
    Wrong(
        name="mean_of_means",
        belief="Divide each loss by the number of micro-batches (as LAB's loop does).",
        caught_by="test_leaves_the_gradients_of_the_window_in_one_batch[unequal]",
        says="a mean of means",
        edits=((LOSS_1, LOSS_1.replace("(len(inputs) / samples)", "(1 / len(micro_batches))")),),
    ),
    Wrong(
        name="adds_up_the_means",
        belief="Gradients accumulate by themselves, so nothing is to be divided.",
        caught_by="test_leaves_the_gradients_of_the_window_in_one_batch[two]",
        says="no divisor",
        edits=((LOSS_1, LOSS_1.replace(" * (len(inputs) / samples)", "")),),
    ),
    Wrong(
        name="all_are_as_large_as_the_first",
        belief="Only the last micro-batch can be smaller, and that little does not matter.",
        caught_by="test_leaves_the_gradients_of_the_window_in_one_batch[short_last]",
        says="the divisor is the first one's size x their number",
        edits=(
            (
                LOSS_1,
                LOSS_1.replace("/ samples", "/ (len(micro_batches[0][0]) * len(micro_batches))"),
            ),
        ),
    ),
    Wrong(
        name="a_hard_coded_divisor",
        belief="accumulation_steps is 4.",
        caught_by="test_leaves_the_gradients_of_the_window_in_one_batch[one_micro_batch]",
        says="are not their shares of the samples",
        edits=((LOSS_1, LOSS_1.replace("* (len(inputs) / samples)", "/ 4")),),
    ),
    Wrong(
        name="zero_grad_in_the_window",
        belief="zero_grad() belongs before every backward().",
        caught_by="test_leaves_the_gradients_of_the_window_in_one_batch[unequal]",
        says="zero_grad() inside the window",
        edits=((BACKWARD_1, "        optimizer.zero_grad()\n" + BACKWARD_1),),
    ),
    Wrong(
        name="clears_after_the_step",
        belief="A step ends with zero_grad().",
        caught_by="test_leaves_the_gradients_of_the_window_in_one_batch[two]",
        says="gradients are cleared after the step",
        edits=(
            (
                LOOP_1,
                LOOP_1.replace(
                    "optimizer.step()\n", "optimizer.step()\n    optimizer.zero_grad()\n"
                ),
            ),
        ),
    ),
    Wrong(
        name="steps_before_the_last_gradient",
        belief="The last micro-batch completes the window, so it steps and goes on.",
        caught_by="test_steps_with_the_gradients_of_the_whole_window",
        says="before the window's last gradient is there",
        edits=(
            (
                HEAD_1,
                HEAD_1.replace(
                    "micro_batches:\n",
                    "micro_batches:\n        if inputs is micro_batches[-1][0]:\n            optimizer.step()\n",
                ),
            ),
            (TAIL_1, TAIL_1.replace("    optimizer.step()\n", "")),
        ),
    ),
    Wrong(
        name="clears_before_the_first_window_only",
        belief="zero_grad() is for the start of training.",
        caught_by="test_trains_as_with_large_batches_over_three_windows",
        says="a window's gradients reach into the next one",
        edits=(
            (
                HEAD_1,
                HEAD_1.replace(
                    "    optimizer.zero_grad()\n",
                    "    if not optimizer.state:\n        optimizer.zero_grad()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="one_backward_at_the_end",
        belief="Add up the losses, then one backward(): it is the same gradient (a framework did so).",
        caught_by="test_a_window_peaks_as_one_micro_batch",
        says="graphs are kept until the window's end",
        edits=(
            (
                LOOP_1,
                LOOP_1.replace(BACKWARD_1, "")
                .replace("loss.detach()", "loss")
                .replace(
                    "    optimizer.step()",
                    "    torch.stack(shares).sum().backward()\n    optimizer.step()",
                )
                .replace(".sum()\n", ".sum().detach()\n"),
            ),
        ),
    ),
    Wrong(
        name="keeps_every_graph",
        belief="retain_graph=True is needed for several backward() calls.",
        caught_by="test_the_peak_is_the_same_for_2_4_and_8_micro_batches",
        says="is kept for each micro-batch",
        edits=(
            (
                LOOP_1,
                LOOP_1.replace("backward()\n", "backward(retain_graph=True)\n")
                .replace("loss.detach()", "loss")
                .replace(".sum()\n", ".sum().detach()\n"),
            ),
        ),
    ),
    Wrong(
        name="keeps_the_gradients_of_each",
        belief="Collect the gradients of all micro-batches, then add them up.",
        caught_by="test_the_peak_is_the_same_for_2_4_and_8_micro_batches",
        says="is kept for each micro-batch",
        edits=(
            (HEAD_1, HEAD_1.replace("    shares = []\n", "    shares, kept = [], []\n" + HELD)),
            (
                TAIL_1,
                TAIL_1.replace(
                    "    optimizer.step()\n",
                    "        kept.append([p.grad for p in held])\n"
                    "        optimizer.zero_grad()\n"
                    "    for p, *grads in zip(held, *kept, strict=True):\n"
                    "        p.grad = None if grads[0] is None else torch.stack(grads).sum(0)\n"
                    "    optimizer.step()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="joins_the_micro_batches",
        belief="The window in one batch is the window in one batch.",
        caught_by="test_takes_the_kth_part_of_the_full_batchs_activations",
        says="micro-batches are joined",
        edits=(
            (
                HEAD_1,
                "    micro_batches = [tuple(map(torch.cat, zip(*micro_batches, strict=True)))]\n"
                + HEAD_1,
            ),
        ),
    ),
    Wrong(
        name="a_second_set_of_gradients",
        belief="backward() overwrites p.grad, so the sum needs a buffer of its own.",
        caught_by="test_holds_one_set_of_gradients",
        says="backward() adds to what is there by itself",
        edits=(
            (
                HEAD_1,
                HEAD_1.replace(
                    "    shares = []\n",
                    "    shares = []\n"
                    + HELD
                    + "    total = [torch.zeros_like(p) for p in held]\n",
                ),
            ),
            (
                TAIL_1,
                TAIL_1.replace(
                    "    optimizer.step()\n",
                    "        for p, t in zip(held, total, strict=True):\n"
                    "            if p.grad is not None:\n                t += p.grad\n"
                    "        optimizer.zero_grad()\n"
                    "    for p, t in zip(held, total, strict=True):\n        p.grad = t\n"
                    "    optimizer.step()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="never_clears",
        belief="Gradients are None at the start, so there is nothing to clear.",
        caught_by="test_ignores_gradients_from_before",
        says="gradients from before the window are in it",
        edits=((HEAD_1, HEAD_1.replace("    optimizer.zero_grad()\n", "")),),
    ),
    Wrong(
        name="clears_the_model_only",
        belief="The optimizer's parameters are the model's.",
        caught_by="test_clears_the_gradients_of_all_that_it_trains",
        says="model.zero_grad() knows the model's parameters only",
        edits=((HEAD_1, HEAD_1.replace("optimizer.zero_grad()", "model.zero_grad()")),),
    ),
    Wrong(
        name="zeros_instead_of_none",
        belief="A gradient of zeros is no gradient.",
        caught_by="test_does_not_step_a_parameter_that_gets_no_gradient",
        says="zeros are a gradient too",
        edits=((HEAD_1, HEAD_1.replace("zero_grad()", "zero_grad(set_to_none=False)")),),
    ),
    Wrong(
        name="a_pass_more_for_the_loss",
        belief="The loss to be returned is that of a pass without gradients.",
        caught_by="test_runs_the_model_once_on_each_micro_batch",
        says="a forward pass too many, perhaps for the loss",
        edits=(
            (
                BACKWARD_1,
                BACKWARD_1 + "        with torch.no_grad():\n"
                "            loss = loss_fn(model(inputs), targets) * (len(inputs) / samples)\n",
            ),
        ),
    ),
    Wrong(
        name="takes_tuples_only",
        belief="A pair is a tuple, since Batch says so.",
        caught_by="test_takes_lists_for_pairs_and_a_tuple_for_the_window",
        says="no pair",
        raises=ValueError,
        edits=(
            (
                CHECK_1,
                "    if not all(isinstance(batch, tuple) for batch in micro_batches):\n"
                '        raise ValueError("no pair")\n' + CHECK_1,
            ),
        ),
    ),
    Wrong(
        name="normalises_in_place",
        belief="Inputs may be prepared where they lie.",
        caught_by="test_takes_lists_for_pairs_and_a_tuple_for_the_window",
        says="inputs are changed in place",
        edits=(
            (
                LOOP_1,
                LOOP_1.replace(
                    "        shares.append(",
                    "        inputs.sub_(inputs.mean())\n        shares.append(",
                ),
            ),
        ),
    ),
    Wrong(
        name="checks_as_it_goes",
        belief="Each micro-batch is checked when its turn comes.",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[more_inputs]",
        says="micro-batches are checked too late",
        edits=(
            (CHECK_1, "    samples"),
            (
                HEAD_1,
                HEAD_1.replace(
                    "micro_batches:\n", "micro_batches:\n        _check_batch((inputs, targets))\n"
                ),
            ),
        ),
    ),
    Wrong(
        name="checks_after_clearing",
        belief="Old gradients are of no use, so they may go first.",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[empty]",
        says="gradients changed",
        edits=((CHECK_1, "    optimizer.zero_grad()\n" + CHECK_1),),
    ),
    Wrong(
        name="lets_lengths_differ",
        belief="The loss function notices when lengths differ (one target for six inputs broadcasts).",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[more_inputs]",
        says="this input is not checked",
        edits=(
            (
                "    if len(inputs) != len(targets) or len(inputs) == 0:\n",
                "    if len(inputs) == 0:\n",
            ),
        ),
    ),
    Wrong(
        name="lets_targets_be_more",
        belief="There must be a target for every input, and no more can be needed.",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[more_targets]",
        says="this input is not checked",
        edits=(
            (
                "    if len(inputs) != len(targets) or len(inputs) == 0:\n",
                "    if len(inputs) > len(targets) or len(inputs) == 0:\n",
            ),
        ),
    ),
    Wrong(
        name="lets_a_micro_batch_be_empty",
        belief="A share of 0 samples is 0 (0 x nan is nan).",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[empty]",
        says="this input is not checked",
        edits=(("len(targets) or len(inputs) == 0:\n", "len(targets):\n"),),
    ),
    Wrong(
        name="takes_the_first_two_of_three",
        belief="What follows inputs and targets is somebody else's.",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[triple]",
        says="no error",
        edits=(
            (PAIR, PAIR.replace("!= 2", "< 2")),
            ("    return batch\n", "    return batch[:2]\n"),
            (
                CHECK_1,
                CHECK_1.replace(
                    "    samples",
                    "    micro_batches = [batch[:2] for batch in micro_batches]\n    samples",
                ),
            ),
        ),
    ),
    Wrong(
        name="an_empty_window_is_no_work",
        belief="Without micro-batches there is nothing to do and nothing to say.",
        caught_by="test_refuses_a_window_without_micro_batches",
        says="no error",
        edits=(
            (
                '        raise ValueError(f"a window needs a micro-batch, and has {len(micro_batches)}")\n'
                "\n    optimizer",
                "        return torch.zeros(())\n\n    optimizer",
            ),
        ),
    ),
    Wrong(
        name="an_empty_window_has_no_number",
        belief="An error need not say what it counted.",
        caught_by="test_refuses_a_window_without_micro_batches",
        says="does not say which value was wrong",
        edits=(
            (
                '        raise ValueError(f"a window needs a micro-batch, and has {len(micro_batches)}")\n'
                "\n    optimizer",
                '        raise ValueError("the window is empty")\n\n    optimizer',
            ),
        ),
    ),
    Wrong(
        name="the_loss_after_the_step",
        belief="The loss of a step is the loss that it leads to.",
        caught_by="test_the_loss_is_that_of_the_weights_before_the_step",
        says="computed anew",
        edits=(
            (
                LOOP_1,
                LOOP_1.replace(
                    "    return torch.stack(shares).sum()\n",
                    "    with torch.no_grad():\n"
                    "        losses = [loss_fn(model(x), y) * (len(x) / samples) for x, y in micro_batches]\n"
                    "    return torch.stack(losses).sum()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="shares_of_the_elements",
        belief="A micro-batch weighs as much as the numbers that are in it.",
        caught_by="test_a_sample_counts_once_however_long_it_is",
        says="by its elements, not by its samples",
        edits=(
            (
                LOSS_1,
                LOSS_1.replace(
                    "(len(inputs) / samples)",
                    "(targets.numel() / sum(y.numel() for _, y in micro_batches))",
                ),
            ),
        ),
    ),
    Wrong(
        name="targets_before_the_output",
        belief="loss_fn takes targets and output in any order.",
        caught_by="test_a_sample_counts_once_however_long_it_is",
        says="loss_fn is called with targets and output",
        edits=((LOSS_1, LOSS_1.replace("model(inputs), targets", "targets, model(inputs)")),),
    ),
    Wrong(
        name="a_hidden_pass_more",
        belief="model.forward() is no pass: no hook sees it.",
        caught_by="test_runs_the_model_once_on_each_micro_batch",
        says="a forward pass too many, perhaps for the loss",
        edits=(
            (
                BACKWARD_1,
                BACKWARD_1 + "        with torch.no_grad():\n            model.forward(inputs)\n",
            ),
        ),
    ),
    Wrong(
        name="switches_to_train_mode",
        belief="A training step starts with model.train().",
        caught_by="test_runs_the_model_once_on_each_micro_batch",
        says="train() is called",
        edits=((CHECK_1, "    model.train()\n" + CHECK_1),),
    ),
    Wrong(
        name="unpacks_what_comes",
        belief="What can be unpacked into two is a pair.",
        caught_by="test_refuses_a_bad_last_micro_batch_before_anything_is_changed[one_tensor]",
        says="the input is not checked before it is used",
        edits=((PAIR, "    if len(batch) != 2:\n"),),
    ),
    # Part 2
    Wrong(
        name="steps_at_every_micro_batch_of_tokens",
        belief="After backward() comes step().",
        caught_by="test_steps_once_on_the_mean_over_the_labelled_tokens",
        says="a step for each micro-batch",
        edits=(
            (
                LOOP_2,
                LOOP_2.replace("loss.backward()\n", "loss.backward()\n        optimizer.step()\n"),
            ),
        ),
    ),
    Wrong(
        name="returns_the_sum_over_tokens",
        belief="The loss is the sum; its divisor is for the gradient.",
        caught_by="test_steps_once_on_the_mean_over_the_labelled_tokens",
        says="not divided",
        edits=((LOOP_2, LOOP_2.replace(".sum()\n", ".sum() * tokens\n")),),
    ),
    Wrong(
        name="returns_the_token_loss_with_its_graph",
        belief="A scalar is small, so it can be kept.",
        caught_by="test_steps_once_on_the_mean_over_the_labelled_tokens",
        says="without a graph",
        edits=((LOOP_2, LOOP_2.replace("loss.detach()", "loss")),),
    ),
    Wrong(
        name="mean_of_token_means",
        belief="cross_entropy's mean, by the number of micro-batches (transformers' Trainer, for years).",
        caught_by="test_every_labelled_token_counts_once",
        says="a mean of means",
        edits=(
            (CROSS_ENTROPY, CROSS_ENTROPY.replace(', reduction="sum"', "")),
            (LOSS_2, LOSS_2.replace("/ tokens", "/ len(micro_batches)")),
        ),
    ),
    Wrong(
        name="means_weighted_by_samples",
        belief="What was right in part 1 is right here.",
        caught_by="test_every_labelled_token_counts_once",
        says="count labelled tokens, not samples",
        edits=(
            (CROSS_ENTROPY, CROSS_ENTROPY.replace(', reduction="sum"', "")),
            (
                LOSS_2,
                LOSS_2.replace("/ tokens", "* len(inputs) / sum(len(x) for x, _ in micro_batches)"),
            ),
        ),
    ),
    Wrong(
        name="padding_in_the_divisor",
        belief="A window has samples x length tokens.",
        caught_by="test_every_labelled_token_counts_once",
        says="tokens without a label are in the divisor",
        edits=((LOSS_2, LOSS_2.replace("/ tokens", "/ sum(y.numel() for _, y in micro_batches)")),),
    ),
    Wrong(
        name="the_sum_is_not_divided",
        belief="With reduction='sum' the gradients of micro-batches add up, and that is all.",
        caught_by="test_every_labelled_token_counts_once",
        says="not divided by their number",
        edits=((LOSS_2, LOSS_2.replace(" / tokens", "")),),
    ),
    Wrong(
        name="shifts_the_targets_again",
        belief="A language model's targets are its inputs, shifted by one.",
        caught_by="test_every_labelled_token_counts_once",
        says="shifted once more",
        edits=(
            (
                LOSS_2,
                LOSS_2.replace(
                    "model(inputs), targets", "model(inputs)[:, :-1], targets[:, 1:]"
                ).replace(
                    "/ tokens",
                    "/ sum(int((y[:, 1:] != ignore_index).sum()) for _, y in micro_batches)",
                ),
            ),
        ),
    ),
    Wrong(
        name="a_mean_over_no_tokens",
        belief="A mean times the number of tokens is the sum (0 x nan is nan).",
        caught_by="test_a_micro_batch_without_labels_adds_nothing[middle]",
        says="a mean over a micro-batch without labels is nan",
        edits=(
            (
                LOSS_2,
                LOSS_2.replace(
                    "ignore_index) / tokens",
                    "ignore_index) * int((targets != ignore_index).sum()) / tokens",
                ),
            ),
            (CROSS_ENTROPY, CROSS_ENTROPY.replace(', reduction="sum"', "")),
        ),
    ),
    Wrong(
        name="stops_at_a_micro_batch_without_labels",
        belief="Where labels end the window ends.",
        caught_by="test_a_micro_batch_without_labels_adds_nothing[middle]",
        says="what follows it is left out",
        edits=(
            (
                LOSS_2,
                "        if not (targets != ignore_index).any():\n            break\n" + LOSS_2,
            ),
        ),
    ),
    Wrong(
        name="counts_targets_that_are_not_minus_100",
        belief="-100 is what PyTorch ignores.",
        caught_by="test_honours_ignore_index[3]",
        says="unlabelled tokens are in the divisor",
        edits=(("(targets != ignore_index).sum()", "(targets != -100).sum()"),),
    ),
    Wrong(
        name="counts_targets_from_zero_on",
        belief="What is ignored is negative.",
        caught_by="test_honours_ignore_index[0]",
        says="unlabelled tokens are in the divisor",
        edits=(("(targets != ignore_index).sum()", "(targets >= 0).sum()"),),
    ),
    Wrong(
        name="trains_on_what_is_to_be_ignored",
        belief="The count heeds ignore_index; the loss has its default.",
        caught_by="test_honours_ignore_index[3]",
        says="ignore_index is not heeded both in the loss and in the count",
        edits=((CROSS_ENTROPY, CROSS_ENTROPY.replace("ignore_index=ignore_index, ", "")),),
    ),
    Wrong(
        name="ignores_ignore_index",
        belief="The default is what everybody uses.",
        caught_by="test_honours_ignore_index[0]",
        says="trained on as a class",
        edits=(
            ("(targets != ignore_index).sum()", "(targets != -100).sum()"),
            (CROSS_ENTROPY, CROSS_ENTROPY.replace("ignore_index=ignore_index, ", "")),
        ),
    ),
    Wrong(
        name="classes_in_the_second_dimension",
        belief="F.cross_entropy takes (samples, length, classes) as it comes.",
        caught_by="test_takes_the_classes_from_the_last_dimension",
        says="takes the length for the classes",
        edits=(
            (
                CROSS_ENTROPY,
                """    if logits.shape[1] == logits.shape[2]:
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
"""
                + CROSS_ENTROPY,
            ),
        ),
    ),
    Wrong(
        name="one_backward_over_all_tokens",
        belief="The divisor is known at the end, so backward() waits for it (torchtune did).",
        caught_by="test_a_window_of_tokens_peaks_as_one_micro_batch",
        says="graphs or logits are kept",
        edits=(
            (
                LOOP_2,
                LOOP_2.replace("        loss.backward()\n", "")
                .replace("loss.detach()", "loss")
                .replace(
                    "    optimizer.step()",
                    "    torch.stack(shares).sum().backward()\n    optimizer.step()",
                )
                .replace(".sum()\n", ".sum().detach()\n"),
            ),
        ),
    ),
    Wrong(
        name="keeps_the_logits",
        belief="Outputs are wanted for the metrics at the end of the window.",
        caught_by="test_the_peak_is_the_same_for_2_4_and_8_micro_batches_of_tokens",
        says="is kept for each micro-batch",
        edits=(
            (
                HEAD_2,
                HEAD_2.replace("shares = []", "shares, kept = [], []").replace(
                    "        loss",
                    "        logits = model(inputs)\n        kept.append(logits.detach())\n        loss",
                ),
            ),
            (
                "_tokens(model(inputs), targets, ignore_index) / tokens",
                "_tokens(logits, targets, ignore_index) / tokens",
            ),
        ),
    ),
    Wrong(
        name="never_clears_before_tokens",
        belief="Gradients are None at the start, so there is nothing to clear.",
        caught_by="test_a_window_of_tokens_starts_without_gradients",
        says="gradients from before the window are in it",
        edits=((HEAD_2, HEAD_2.replace("    optimizer.zero_grad()\n", "")),),
    ),
    Wrong(
        name="clears_the_model_before_tokens",
        belief="The optimizer's parameters are the model's.",
        caught_by="test_a_window_of_tokens_starts_without_gradients",
        says="are to be dropped, not zeroed",
        edits=((HEAD_2, HEAD_2.replace("optimizer.zero_grad()", "model.zero_grad()")),),
    ),
    Wrong(
        name="zeros_before_tokens",
        belief="A gradient of zeros is no gradient.",
        caught_by="test_a_window_of_tokens_starts_without_gradients",
        says="are to be dropped, not zeroed",
        edits=((HEAD_2, HEAD_2.replace("zero_grad()", "zero_grad(set_to_none=False)")),),
    ),
    Wrong(
        name="pads_all_to_one_length",
        belief="Micro-batches of a window must have one length.",
        caught_by="test_runs_the_model_once_on_each_micro_batch_of_tokens",
        says="a forward pass too many",
        edits=(
            (
                LOSS_2,
                "        longest = max(x.shape[1] for x, _ in micro_batches)\n"
                "        more = (0, longest - inputs.shape[1])\n"
                "        inputs = F.pad(inputs, more)\n"
                "        targets = F.pad(targets, more, value=ignore_index)\n" + LOSS_2,
            ),
        ),
    ),
    Wrong(
        name="counts_tokens_from_the_output",
        belief="A pass without gradients finds out how many tokens there are.",
        caught_by="test_runs_the_model_once_on_each_micro_batch_of_tokens",
        says="a forward pass too many",
        edits=((LOSS_2, "        with torch.no_grad():\n            model(inputs)\n" + LOSS_2),),
    ),
    Wrong(
        name="compares_numbers_of_tokens_only",
        belief="As many targets as inputs is what matters.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[as_many_elements]",
        says="this input is not checked",
        edits=(
            (
                "    if inputs.shape != targets.shape or",
                "    if inputs.numel() != targets.numel() or",
            ),
        ),
    ),
    Wrong(
        name="compares_samples_only",
        belief="As in part 1, there must be a target for each sample.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[another_length]",
        says="does not say which value was wrong",
        edits=(
            ("    if inputs.shape != targets.shape or", "    if len(inputs) != len(targets) or"),
        ),
    ),
    Wrong(
        name="broadcasts_the_targets",
        belief="One row of targets serves all samples.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[one_for_all]",
        says="does not say which value was wrong",
        edits=(
            (
                "    if inputs.shape != targets.shape or",
                "    if inputs.shape[1:] != targets.shape[1:] or",
            ),
        ),
    ),
    Wrong(
        name="lets_samples_be_none",
        belief="No samples are no harm.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[no_samples]",
        says="is not checked",
        edits=(
            ("targets.shape or inputs.numel() == 0:\n", "targets.shape or inputs.shape[1] == 0:\n"),
        ),
    ),
    Wrong(
        name="lets_length_be_none",
        belief="len() tells whether a tensor is empty.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[no_length]",
        says="is not checked",
        edits=(
            ("targets.shape or inputs.numel() == 0:\n", "targets.shape or len(inputs) == 0:\n"),
        ),
    ),
    Wrong(
        name="divides_by_at_least_one",
        belief="max(tokens, 1) is the usual guard.",
        caught_by="test_refuses_a_window_without_labelled_tokens[2]",
        says="no error",
        edits=((NO_TOKENS, "    tokens = max(tokens, 1)\n"),),
    ),
    Wrong(
        name="tells_no_tokens_after_clearing",
        belief="Old gradients are of no use, so they may go first.",
        caught_by="test_refuses_a_window_without_labelled_tokens[-100]",
        says="labelled tokens are counted too late",
        edits=((NO_TOKENS, "    optimizer.zero_grad()\n" + NO_TOKENS),),
    ),
    Wrong(
        name="an_empty_window_of_tokens_is_no_work",
        belief="Without micro-batches there is nothing to do and nothing to say.",
        caught_by="test_refuses_a_window_without_micro_batches_of_tokens",
        says="no error",
        edits=(
            (NO_TOKENS, "    if not micro_batches:\n        return torch.zeros(())\n" + NO_TOKENS),
        ),
    ),
    Wrong(
        name="takes_tuples_of_tokens_only",
        belief="A pair is a tuple, since Batch says so.",
        caught_by="test_steps_once_on_the_mean_over_the_labelled_tokens",
        says="no pair",
        raises=ValueError,
        edits=(
            (
                NO_TOKENS,
                "    if not all(isinstance(batch, tuple) for batch in micro_batches):\n"
                '        raise ValueError("no pair")\n' + NO_TOKENS,
            ),
        ),
    ),
    Wrong(
        name="views_the_targets",
        belief="view(-1) is flatten().",
        caught_by="test_every_labelled_token_counts_once",
        says="view size is not compatible",
        raises=RuntimeError,
        edits=((CROSS_ENTROPY, CROSS_ENTROPY.replace("targets.flatten()", "targets.view(-1)")),),
    ),
    Wrong(
        name="views_the_logits",
        belief="view(-1, classes) is flatten(0, 1).",
        caught_by="test_takes_the_classes_from_the_last_dimension",
        says="view size is not compatible",
        raises=RuntimeError,
        edits=(
            (
                CROSS_ENTROPY,
                CROSS_ENTROPY.replace("flatten(0, 1)", "view(-1, logits.shape[-1])"),
            ),
        ),
    ),
    Wrong(
        name="relabels_the_targets",
        belief="With -100 for what is to be ignored the rest is easy.",
        caught_by="test_honours_ignore_index[0]",
        says="targets are changed in place",
        edits=(
            (
                LOSS_2,
                "        targets[targets == ignore_index] = -100\n"
                + LOSS_2.replace("ignore_index", "-100"),
            ),
        ),
    ),
    Wrong(
        name="a_nan_for_a_micro_batch_without_labels",
        belief="The gradient is what counts, and it is a sum.",
        caught_by="test_a_micro_batch_without_labels_adds_nothing[middle]",
        says="a mean over a micro-batch without labels is nan",
        edits=(
            (
                LOOP_2,
                LOOP_2.replace(
                    "shares.append(loss.detach())",
                    "count = (targets != ignore_index).sum()\n"
                    "        shares.append(loss.detach() / count * count)",
                ),
            ),
        ),
    ),
    Wrong(
        name="a_second_set_of_gradients_for_tokens",
        belief="backward() overwrites p.grad, so the sum needs a buffer of its own.",
        caught_by="test_a_window_of_tokens_holds_one_set_of_gradients",
        says="backward() adds to what is there by itself",
        edits=(
            (
                HEAD_2,
                HEAD_2.replace(
                    "    shares = []\n",
                    "    shares = []\n"
                    + HELD
                    + "    total = [torch.zeros_like(p) for p in held]\n",
                ),
            ),
            (
                LOOP_2,
                LOOP_2.replace(
                    "    optimizer.step()\n",
                    "        for p, t in zip(held, total, strict=True):\n"
                    "            if p.grad is not None:\n                t += p.grad\n"
                    "        optimizer.zero_grad()\n"
                    "    for p, t in zip(held, total, strict=True):\n        p.grad = t\n"
                    "    optimizer.step()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="switches_to_train_mode_for_tokens",
        belief="A training step starts with model.train().",
        caught_by="test_runs_the_model_once_on_each_micro_batch_of_tokens",
        says="train() is called",
        edits=((NO_TOKENS, "    model.train()\n" + NO_TOKENS),),
    ),
    Wrong(
        name="two_tokens_of_three",
        belief="What follows inputs and targets is an attention mask, and none of my business.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[triple]",
        says="no error",
        edits=(
            (TOKENS_PAIR, TOKENS_PAIR.replace("_pair(batch)", "batch[:2]")),
            (
                "    tokens = _count_tokens(micro_batches, ignore_index)\n    if tokens == 0:\n",
                "    micro_batches = [batch[:2] for batch in micro_batches]\n"
                "    tokens = _count_tokens(micro_batches, ignore_index)\n    if tokens == 0:\n",
            ),
        ),
    ),
    Wrong(
        name="unpacks_what_comes_as_tokens",
        belief="What can be unpacked into two is a pair.",
        caught_by="test_refuses_a_bad_last_micro_batch_of_tokens[one_tensor]",
        says="micro-batches are checked too late",
        edits=((TOKENS_PAIR, TOKENS_PAIR.replace("_pair(batch)", "batch")),),
    ),
    # Part 3
    Wrong(
        name="drops_the_last_window",
        belief="A step comes when (i + 1) % accumulation_steps == 0 (LAB's loop).",
        caught_by="test_returns_a_result_for_each_window[fp32]",
        says="the last window is dropped because it is not full",
        edits=((WINDOWS, WINDOWS + "        if len(batches) < window:\n            break\n"),),
    ),
    Wrong(
        name="returns_numbers",
        belief="Results are for printing.",
        caught_by="test_returns_a_result_for_each_window[bf16]",
        says="loss as a float32 tensor",
        edits=(
            (
                "WindowResult(torch.stack(shares).sum(), grad_norm, skipped)",
                "WindowResult(torch.stack(shares).sum().item(), grad_norm, skipped)",
            ),
        ),
    ),
    Wrong(
        name="returns_the_scaled_loss",
        belief="The loss is what backward() was called on.",
        caught_by="test_returns_a_result_for_each_window[fp16]",
        says="it is scaled still",
        edits=(
            (
                BACKWARD_3,
                "            loss = loss if scaler is None else scaler.scale(loss)\n            loss.backward()\n",
            ),
        ),
    ),
    Wrong(
        name="results_keep_their_graphs",
        belief="A scalar is small, so it can be kept.",
        caught_by="test_returns_a_result_for_each_window[fp32]",
        says="without a graph",
        edits=((SHARE_3, SHARE_3.replace(".detach()", "")),),
    ),
    Wrong(
        name="divides_by_the_full_window",
        belief="Every window has `window` micro-batches (Lightning divides the last one so).",
        caught_by="test_an_epoch_is_that_of_large_batches[short_last_window]",
        says="loss of window 3",
        edits=(
            (WINDOWS, FULL + WINDOWS),
            (FORWARD_3, FORWARD_3.replace("(len(inputs) / samples)", "(1 / FULL)")),
        ),
    ),
    Wrong(
        name="means_of_means_in_an_epoch",
        belief="Divide by the micro-batches that the window really has; they are of one size.",
        caught_by="test_an_epoch_is_that_of_large_batches[small_last_micro_batch]",
        says="loss of window 3",
        edits=((FORWARD_3, FORWARD_3.replace("(len(inputs) / samples)", "(1 / len(batches))")),),
    ),
    Wrong(
        name="divides_the_gradients_of_a_full_window",
        belief="The loss is only reported; the gradient is divided by what a full window has.",
        caught_by="test_an_epoch_is_that_of_large_batches[short_last_window]",
        says="every window is divided by what a full one has",
        edits=(
            (WINDOWS, FULL + WINDOWS),
            (
                BACKWARD_3,
                BACKWARD_3.replace(
                    "(loss if scaler is None else scaler.scale(loss)).backward()",
                    "part = loss * (len(batches) / FULL)\n"
                    "            (part if scaler is None else scaler.scale(part)).backward()",
                ),
            ),
        ),
    ),
    Wrong(
        name="never_steps_in_an_epoch",
        belief="Whoever made the optimizer steps it.",
        caught_by="test_returns_a_result_for_each_window[bf16]",
        says="optimizer steps",
        edits=(("        optimizer.step()\n        return False\n", "        return False\n"),),
    ),
    Wrong(
        name="one_window_for_the_epoch",
        belief="`window` is the number of samples.",
        caught_by="test_an_epoch_is_that_of_large_batches[of_one]",
        says="number of windows",
        edits=(("itertools.islice(iterator, window)", "itertools.islice(iterator, window + 1)"),),
    ),
    Wrong(
        name="schedule_before_the_step",
        belief="The rate of a step is set right before it.",
        caught_by="test_an_epoch_is_that_of_large_batches[unequal]",
        says="before it have stepped otherwise",
        edits=(
            (SCHEDULE_3, ""),
            (
                WINDOWS,
                WINDOWS + "        if scheduler is not None:\n            scheduler.step()\n",
            ),
        ),
    ),
    Wrong(
        name="autocast_in_float32_too",
        belief="float32 under autocast is float32: the default dtype will do.",
        caught_by="test_an_epoch_is_that_of_large_batches[of_one]",
        says="of window 1",
        edits=(
            (
                FORWARD_3,
                FORWARD_3.replace(
                    "dtype, enabled=dtype != torch.float32",
                    "dtype if dtype != torch.float32 else torch.bfloat16",
                ),
            ),
        ),
    ),
    Wrong(
        name="backward_under_autocast",
        belief="What belongs to the micro-batch belongs under autocast.",
        caught_by="test_runs_each_forward_and_loss_under_autocast[bf16]",
        says="backward() is inside the autocast block",
        edits=((BACKWARD_3, BACKWARD_3.replace("            ", "                ")),),
    ),
    Wrong(
        name="the_loss_outside_autocast",
        belief="Only the model needs autocast.",
        caught_by="test_runs_each_forward_and_loss_under_autocast[fp16]",
        says="the loss is outside the autocast block",
        edits=((FORWARD_3, FORWARD_3.replace("                loss =", "            loss =")),),
    ),
    Wrong(
        name="autocast_without_its_dtype",
        belief="autocast knows which 16-bit type is meant.",
        caught_by="test_runs_each_forward_and_loss_under_autocast[fp16]",
        says="dtypes inside the model",
        edits=(
            (FORWARD_3, FORWARD_3.replace("device.type, dtype,", "device.type, torch.bfloat16,")),
        ),
    ),
    Wrong(
        name="casts_the_model",
        belief="Mixed precision is a model in 16 bits.",
        caught_by="test_runs_each_forward_and_loss_under_autocast[bf16]",
        says="the model is cast",
        edits=((FORWARD_3, "            model.to(dtype)\n" + FORWARD_3),),
    ),
    Wrong(
        name="the_output_in_16_bits",
        belief="Under autocast the loss function takes what the model gives.",
        caught_by="test_runs_each_forward_and_loss_under_autocast[bf16]",
        says="the output goes to the loss in 16 bits",
        edits=((FORWARD_3, FORWARD_3.replace("output.float()", "output")),),
    ),
    Wrong(
        name="clips_every_micro_batch",
        belief="Clipping comes right after backward().",
        caught_by="test_clips_the_windows_true_gradient_once[longer-fp32]",
        says="it is the norm of one micro-batch",
        edits=(
            (
                SHARE_3,
                SHARE_3 + "            if max_norm is not None:\n"
                "                nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="norm_before_unscaling",
        belief="Unscaling is scaler.step()'s business.",
        caught_by="test_clips_the_windows_true_gradient_once[longer-fp16]",
        says="the norm is taken before unscale_",
        edits=((UNSCALE_3, ""),),
    ),
    Wrong(
        name="returns_the_norm_after_clipping",
        belief="The gradient norm is that of the gradients that are used.",
        caught_by="test_clips_the_windows_true_gradient_once[longer-bf16]",
        says="or of clipped gradients",
        edits=((CLIP_3, CLIP_3 + NORM_3),),
    ),
    Wrong(
        name="scales_to_max_norm",
        belief="Clipping to a norm makes the norm that.",
        caught_by="test_clips_the_windows_true_gradient_once[shorter-fp32]",
        says="or short ones too",
        edits=(
            (
                CLIP_3,
                "        if max_norm is not None:\n"
                "            for p in parameters:\n"
                "                if p.grad is not None:\n"
                "                    p.grad.mul_(max_norm / grad_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="never_clips",
        belief="Accumulated gradients are averages, and averages need no clipping.",
        caught_by="test_clips_the_windows_true_gradient_once[longer-fp16]",
        says="gradients are not clipped",
        edits=((CLIP_3, ""),),
    ),
    Wrong(
        name="updates_the_scale_every_micro_batch",
        belief="update() follows every scaled backward().",
        caught_by="test_updates_the_scale_once_a_window",
        says="No inf checks",
        raises=AssertionError,
        edits=(
            (
                SHARE_3,
                SHARE_3 + "            if scaler is not None:\n                scaler.update()\n",
            ),
        ),
    ),
    Wrong(
        name="unscales_every_micro_batch",
        belief="unscale_() follows every scaled backward().",
        caught_by="test_updates_the_scale_once_a_window",
        says="already been called",
        raises=RuntimeError,
        edits=(
            (UNSCALE_3, ""),
            (
                SHARE_3,
                SHARE_3
                + "            if scaler is not None:\n                scaler.unscale_(optimizer)\n",
            ),
        ),
    ),
    Wrong(
        name="unscales_and_updates_every_micro_batch",
        belief="Each micro-batch is a step of the scaler; only the optimizer waits.",
        caught_by="test_updates_the_scale_once_a_window",
        says="or is called for every micro-batch",
        edits=(
            (UNSCALE_3, ""),
            (
                SHARE_3,
                SHARE_3 + "            if scaler is not None:\n"
                "                scaler.unscale_(optimizer)\n"
                "                scaler.update()\n",
            ),
            (STEP_3, "    optimizer.step()\n"),
        ),
    ),
    Wrong(
        name="never_updates_the_scale",
        belief="The scale is a constant.",
        caught_by="test_updates_the_scale_once_a_window",
        says="unscale_() is being called after step()",
        raises=RuntimeError,
        edits=((STEP_3, "    scaler.step(optimizer)\n"),),
    ),
    Wrong(
        name="schedule_every_micro_batch",
        belief="scheduler.step() stands at the end of the loop body.",
        caught_by="test_the_schedule_advances_once_for_each_step_taken[fp32]",
        says="it advances for every micro-batch",
        edits=(
            (
                SCHEDULE_3,
                "        for _ in batches:\n            if scheduler is not None:\n                scheduler.step()\n",
            ),
        ),
    ),
    Wrong(
        name="schedule_after_a_skipped_window",
        belief="A window is a step of the schedule, whatever came of it.",
        caught_by="test_the_schedule_advances_once_for_each_step_taken[fp16]",
        says="or after a skipped window",
        edits=((SCHEDULE_3, SCHEDULE_3.replace(" and not result.skipped", "")),),
    ),
    Wrong(
        name="schedule_for_full_windows_only",
        belief="The schedule counts full windows.",
        caught_by="test_the_schedule_advances_once_for_each_step_taken[bf16]",
        says="or not at the last",
        edits=((SCHEDULE_3, SCHEDULE_3.replace("not result.skipped", "len(batches) == window")),),
    ),
    Wrong(
        name="schedule_needs_a_scaler",
        belief="Only a scaler can say that a step was taken.",
        caught_by="test_the_schedule_advances_once_for_each_step_taken[fp32]",
        says="rate after 4 steps",
        edits=(
            (SCHEDULE_3, SCHEDULE_3.replace("if scheduler is not None", "if scheduler and scaler")),
        ),
    ),
    Wrong(
        name="the_ratio_upside_down",
        belief="A larger batch takes smaller steps.",
        caught_by="test_scaled_lr_follows_its_rule[goyal]",
        says="upside down",
        edits=(("lr * new_batch_size / batch_size", "lr * batch_size / new_batch_size"),),
    ),
    Wrong(
        name="the_rules_exchanged",
        belief="The root is for SGD.",
        caught_by="test_scaled_lr_follows_its_rule[adam]",
        says="the rules are exchanged",
        edits=(
            ('rule == "linear":', 'rule == "root":'),
            ('rule == "sqrt":', 'rule == "linear":'),
            ('rule == "root":', 'rule == "sqrt":'),
        ),
    ),
    Wrong(
        name="whole_ratios_only",
        belief="A window is so many times a micro-batch.",
        caught_by="test_scaled_lr_follows_its_rule[no_multiple]",
        says="whole numbers only",
        edits=(("lr * new_batch_size / batch_size", "lr * (new_batch_size // batch_size)"),),
    ),
    Wrong(
        name="never_scales_down",
        belief="The rules are for larger batches.",
        caught_by="test_scaled_lr_follows_its_rule[smaller]",
        says="linear rate from",
        edits=(("lr * new_batch_size / batch_size", "lr * max(1.0, new_batch_size / batch_size)"),),
    ),
    Wrong(
        name="one_backward_for_a_window_of_an_epoch",
        belief="Add up the losses, then one backward().",
        caught_by="test_every_window_of_an_epoch_peaks_as_one_micro_batch[bf16]",
        says="are kept for each micro-batch",
        edits=(
            (BACKWARD_3 + SHARE_3, "            shares.append(loss)\n"),
            (
                UNSCALE_3,
                "        total = torch.stack(shares).sum()\n"
                "        (total if scaler is None else scaler.scale(total)).backward()\n"
                "        shares = [total.detach().float()]\n" + UNSCALE_3,
            ),
        ),
    ),
    Wrong(
        name="keeps_the_outputs",
        belief="Outputs are wanted for the metrics at the end of the window.",
        caught_by="test_every_window_of_an_epoch_peaks_as_one_micro_batch[fp32]",
        says="are kept for each micro-batch",
        edits=(
            (
                "        shares = []\n        for inputs, targets in batches:\n",
                "        shares, kept = [], []\n        for inputs, targets in batches:\n",
            ),
            (SHARE_3, SHARE_3 + "            kept.append(output)\n"),
        ),
    ),
    Wrong(
        name="joins_all_gradients_for_their_norm",
        belief="The norm of the gradients is that of one long vector.",
        caught_by="test_an_epoch_holds_one_set_of_gradients[fp32]",
        says="or for their norm",
        edits=(
            (
                NORM_3,
                "        grad_norm = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()\n",
            ),
        ),
    ),
    Wrong(
        name="adds_up_unscaled_gradients",
        belief="Each micro-batch has to be unscaled before it can be added to the others.",
        caught_by="test_an_epoch_holds_one_set_of_gradients[fp16]",
        says="to unscale them",
        edits=(
            (
                SHARE_3,
                SHARE_3 + "            if scaler is not None:\n"
                '                held = [p for g in optimizer.param_groups for p in g["params"]]\n'
                "                if len(shares) == 1:\n"
                "                    total = [torch.zeros_like(p) for p in held]\n"
                "                for p, t in zip(held, total, strict=True):\n"
                "                    t += p.grad\n"
                "                    p.grad = t if len(shares) == len(batches) else None\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_graphs_of_a_window",
        belief="retain_graph=True is needed for several backward() calls.",
        caught_by="test_every_window_of_an_epoch_peaks_as_one_micro_batch[fp16]",
        says="are kept for each micro-batch",
        edits=(
            (BACKWARD_3, BACKWARD_3.replace("backward()", "backward(retain_graph=True)")),
            (SHARE_3, "            shares.append(loss.float())\n"),
            (
                "torch.stack(shares).sum(), grad_norm, skipped",
                "torch.stack(shares).sum().detach(), grad_norm, skipped",
            ),
        ),
    ),
    Wrong(
        name="keeps_every_micro_batch",
        belief="The data of an epoch may be wanted again.",
        caught_by="test_the_peak_does_not_grow_with_the_number_of_windows",
        says="all fetched first or kept",
        edits=((WINDOWS, "    seen = []\n" + WINDOWS + "        seen += batches\n"),),
    ),
    Wrong(
        name="looks_at_the_last_micro_batch_for_overflow",
        belief="An overflow stays in the gradients, and a finite loss at the end is a good sign.",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[first]",
        says="steps taken in three windows = 2",
        edits=(
            (
                SHARE_3,
                SHARE_3 + "            if inputs is not batches[-1][0]:\n"
                '                for p in (p for group in optimizer.param_groups for p in group["params"]):\n'
                "                    if p.grad is not None:\n"
                "                        p.grad.nan_to_num_(0.0, 0.0, 0.0)\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_the_bad_micro_batch_out",
        belief="One bad micro-batch need not cost the others.",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[last]",
        says="steps taken in three windows = 2",
        edits=(
            (
                UNSCALE_3,
                '        for p in (p for group in optimizer.param_groups for p in group["params"]):\n'
                "            if p.grad is not None:\n"
                "                p.grad.nan_to_num_(0.0, 0.0, 0.0)\n" + UNSCALE_3,
            ),
        ),
    ),
    Wrong(
        name="steps_without_asking_the_scaler",
        belief="After unscale_() the optimizer can step by itself.",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[middle]",
        says="steps taken in three windows = 2",
        edits=((STEP_3, "    optimizer.step()\n    scaler.update()\n"),),
    ),
    Wrong(
        name="keeps_the_gradients_of_a_skipped_window",
        belief="What has not been used up is for the next window.",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[first]",
        says="steps taken in three windows = 2",
        edits=(
            (
                "    samples = sum(len(inputs) for inputs, _ in batches)\n    optimizer.zero_grad()\n",
                "    samples = sum(len(inputs) for inputs, _ in batches)\n    skipped = False\n",
            ),
            (
                FINALLY_3,
                "    finally:\n        if not skipped:\n            optimizer.zero_grad()\n",
            ),
        ),
    ),
    Wrong(
        name="never_tells_of_a_skip",
        belief="The scaler skips by itself, so nobody needs to know.",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[middle]",
        says="the skipped window is not noticed",
        edits=(
            (
                "    return scaler.get_scale() < scale  # it falls after an overflow and at no other time\n",
                "    return False\n",
            ),
        ),
    ),
    Wrong(
        name="backs_off_twice",
        belief="A skipped window lowers the scale, and so does its update().",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[last]",
        says="or the scale falls more than once",
        edits=(
            (
                STEP_3,
                STEP_3
                + "    if scaler.get_scale() < scale:\n        scaler.update(scaler.get_scale() / 2)\n",
            ),
        ),
    ),
    Wrong(
        name="reads_all_windows_first",
        belief="A list is easier to cut into windows, and len() is known.",
        caught_by="test_takes_no_micro_batch_of_the_next_window_before_the_step[6]",
        says="all of them",
        edits=(
            (
                "iter(micro_batches), list[WindowResult]()",
                "iter(list(micro_batches)), list[WindowResult]()",
            ),
        ),
    ),
    Wrong(
        name="looks_one_ahead",
        belief="Whether a micro-batch is the last is seen by asking for the next one.",
        caught_by="test_takes_no_micro_batch_of_the_next_window_before_the_step[7]",
        says="or one, to know whether it is the last",
        edits=(
            (
                WINDOWS,
                WINDOWS + "        following = list(itertools.islice(iterator, 1))\n"
                "        iterator = itertools.chain(following, iterator)\n",
            ),
        ),
    ),
    Wrong(
        name="clears_before_a_window_only",
        belief="The next window clears what this one leaves.",
        caught_by="test_leaves_nothing_of_an_unfinished_window[nowhere]",
        says="grad None in every parameter",
        edits=((FINALLY_3, "    finally:\n        pass\n"),),
    ),
    Wrong(
        name="clears_after_good_windows_only",
        belief="An error ends the run, so nobody will see the gradients.",
        caught_by="test_leaves_nothing_of_an_unfinished_window[loss]",
        says="after the last, or an error, they stay",
        edits=(
            (
                FINALLY_3,
                "    except ZeroDivisionError:\n        raise\n    optimizer.zero_grad()\n",
            ),
        ),
    ),
    Wrong(
        name="zeros_after_the_epoch",
        belief="Zeros are as good as None.",
        caught_by="test_leaves_nothing_of_an_unfinished_window[model]",
        says="grad None in every parameter",
        edits=((FINALLY_3, FINALLY_3.replace("zero_grad()", "zero_grad(set_to_none=False)")),),
    ),
    Wrong(
        name="autocast_by_hand",
        belief="set_autocast_enabled() before the forward pass and after it.",
        caught_by="test_leaves_nothing_of_an_unfinished_window[model]",
        says="autocast is entered and left by hand",
        edits=(
            (
                FORWARD_3,
                """            torch.set_autocast_dtype(inputs.device.type, dtype)
            torch.set_autocast_enabled(inputs.device.type, dtype != torch.float32)
            output = model(inputs)
            loss = loss_fn(output.float(), targets) * (len(inputs) / samples)
            torch.set_autocast_enabled(inputs.device.type, False)
            torch.clear_autocast_cache()
""",
            ),
        ),
    ),
    Wrong(
        name="steps_on_an_unfinished_window",
        belief="When the data fail, train on what is there.",
        caught_by="test_leaves_nothing_of_an_unfinished_window[data]",
        says="the unfinished window has stepped",
        edits=(
            (
                WINDOWS,
                """    error = None
    while error is None:
        batches = []
        try:
            for batch in itertools.islice(iterator, window):
                batches.append(batch)
        except OSError as broken:
            error = broken
        if not batches:
            break
""",
            ),
            (
                "    if not results:\n",
                "    if error is not None:\n        raise error\n    if not results:\n",
            ),
        ),
    ),
    Wrong(
        name="checks_the_epoch_beforehand",
        belief="Bad data are found before training starts.",
        caught_by="test_a_bad_micro_batch_ends_the_epoch_before_its_window[lengths]",
        says="no step has been taken",
        edits=(
            (
                WINDOWS,
                "    everything = list(iterator)\n    for batch in everything:\n        _check_batch(batch)\n"
                "    iterator = iter(everything)\n" + WINDOWS,
            ),
        ),
    ),
    Wrong(
        name="checks_no_micro_batch_of_an_epoch",
        belief="The loss function looks at the shapes.",
        caught_by="test_a_bad_micro_batch_ends_the_epoch_before_its_window[lengths]",
        says="ValueError whose message holds '4' and '9'",
        edits=(("    for batch in batches:\n        _check_batch(batch)\n", ""),),
    ),
    Wrong(
        name="a_window_of_nothing_is_everything",
        belief="islice stops by itself.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[window_zero]",
        says="does not say which value",
        edits=(
            ("    if window < 1:\n", "    if window < 0:\n"),
            ('"0 micro-batches: the iterator', '"no micro-batches: the iterator'),
        ),
    ),
    Wrong(
        name="a_negative_window_is_islices_business",
        belief="islice looks at its arguments.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[window_negative]",
        says="does not say which value",
        edits=(("    if window < 1:\n", "    if window == 0:\n"),),
    ),
    Wrong(
        name="any_dtype_will_do",
        belief="autocast says itself what it cannot do.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[dtype]",
        says="this input is not checked",
        edits=(
            (
                "    if dtype not in (torch.float32, torch.bfloat16, torch.float16):\n",
                "    if not dtype.is_floating_point:\n",
            ),
        ),
    ),
    Wrong(
        name="float16_without_a_scaler",
        belief="A scaler is an improvement that can be left out.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[no_scaler]",
        says="this input is not checked",
        edits=(
            (
                "    if (scaler is not None) != (dtype == torch.float16):\n",
                "    if scaler is not None and dtype != torch.float16:\n",
            ),
        ),
    ),
    Wrong(
        name="a_scaler_is_harmless_with_bfloat16",
        belief="A scale that is not needed does no harm.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[scaler_for_bf16]",
        says="this input is not checked",
        edits=(
            (
                "    if (scaler is not None) != (dtype == torch.float16):\n",
                "    if (scaler is not None) != (dtype in (torch.float16, torch.bfloat16)):\n",
            ),
        ),
    ),
    Wrong(
        name="a_scaler_is_harmless_with_float32",
        belief="A scale that is not needed does no harm.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[scaler_for_fp32]",
        says="this input is not checked",
        edits=(
            (
                "    if (scaler is not None) != (dtype == torch.float16):\n",
                "    if dtype != torch.float32 and (scaler is not None) != (dtype == torch.float16):\n",
            ),
        ),
    ),
    Wrong(
        name="any_max_norm_will_do",
        belief="A norm that is not positive clips to nothing.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[max_norm]",
        says="this input is not checked",
        edits=(("    if max_norm is not None and not max_norm > 0:\n", "    if max_norm == 0:\n"),),
    ),
    Wrong(
        name="max_norm_zero_is_none",
        belief="0 says that there is no clipping.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[zero_norm]",
        says="this input is not checked",
        edits=(
            (
                "    if max_norm is not None and not max_norm > 0:\n",
                "    if max_norm and not max_norm > 0:\n",
            ),
        ),
    ),
    Wrong(
        name="max_norm_nan_is_not_below_zero",
        belief="max_norm <= 0 is the opposite of max_norm > 0.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[nan_norm]",
        says="this input is not checked",
        edits=(
            (
                "    if max_norm is not None and not max_norm > 0:\n",
                "    if max_norm is not None and max_norm <= 0:\n",
            ),
        ),
    ),
    Wrong(
        name="checks_options_at_the_first_window",
        belief="Options are looked at where they are used.",
        caught_by="test_refuses_bad_options_before_anything_is_changed[dtype]",
        says="when micro-batches have been read",
        edits=(
            ("    _check_epoch(window, dtype, scaler, max_norm)\n", ""),
            (WINDOWS, WINDOWS + "        _check_epoch(window, dtype, scaler, max_norm)\n"),
        ),
    ),
    Wrong(
        name="an_empty_epoch_is_a_short_one",
        belief="No micro-batches, no results.",
        caught_by="test_refuses_an_epoch_without_micro_batches[iterator]",
        says="no error",
        edits=(
            (
                '    if not results:\n        raise ValueError("0 micro-batches: the iterator is empty, or was read to its end before")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="asks_for_the_length",
        belief="Micro-batches come in a list.",
        caught_by="test_refuses_an_epoch_without_micro_batches[list]",
        says="does not say which value",
        edits=(('"0 micro-batches: the iterator', '"no micro-batches: the iterator'),),
    ),
    Wrong(
        name="clips_the_parameters_of_the_model",
        belief="The optimizer's parameters are the model's.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[fp16]",
        says="or those of other parameters",
        edits=(
            (
                '        parameters = [p for group in optimizer.param_groups for p in group["params"]]\n',
                "        parameters = list(model.parameters())\n",
            ),
        ),
    ),
    Wrong(
        name="clips_the_first_group",
        belief="An optimizer has one group.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[fp32]",
        says="or of one group only",
        edits=(
            (
                '        parameters = [p for group in optimizer.param_groups for p in group["params"]]\n',
                '        parameters = optimizer.param_groups[0]["params"]\n',
            ),
        ),
    ),
    Wrong(
        name="zeros_before_a_window",
        belief="A gradient of zeros is no gradient.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[bf16]",
        says="a parameter without gradient",
        edits=(
            (
                "    samples = sum(len(inputs) for inputs, _ in batches)\n    optimizer.zero_grad()\n",
                "    samples = sum(len(inputs) for inputs, _ in batches)\n    optimizer.zero_grad(set_to_none=False)\n",
            ),
        ),
    ),
    Wrong(
        name="never_clears_before_an_epoch",
        belief="Every window leaves the gradients clear, so they are clear at the start.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[fp32]",
        says="stale gradients are in it",
        edits=(
            (
                "    samples = sum(len(inputs) for inputs, _ in batches)\n    optimizer.zero_grad()\n",
                "    samples = sum(len(inputs) for inputs, _ in batches)\n",
            ),
        ),
    ),
    Wrong(
        name="the_loss_turned_to_float32_too_late",
        belief="loss.float() is enough against overflow.",
        caught_by="test_the_float16_loss_of_a_window_does_not_overflow",
        says="its scaled gradient starts out infinite",
        edits=(
            (
                FORWARD_3,
                FORWARD_3.replace(
                    "loss_fn(output.float(), targets)", "loss_fn(output, targets).float()"
                ),
            ),
        ),
    ),
    Wrong(
        name="reads_the_overflow_off_the_norm",
        belief="An infinite norm means an infinite gradient.",
        caught_by="test_tells_skipped_from_the_scaler_alone[huge_gradient]",
        says="ask the scaler whether it skipped",
        edits=(
            (
                "        skipped = _step(optimizer, scaler)\n",
                "        skipped = _step(optimizer, scaler) or (scaler is not None and not bool(grad_norm.isfinite()))\n",
            ),
        ),
    ),
    Wrong(
        name="clips_to_infinity",
        belief="No clipping is clipping to an infinite norm.",
        caught_by="test_tells_skipped_from_the_scaler_alone[huge_gradient]",
        says="inf / inf is nan",
        edits=(
            (
                CLIP_3,
                "        clip_grads_with_norm_(parameters, math.inf if max_norm is None else max_norm, grad_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="skips_without_a_scaler",
        belief="A window whose norm is infinite is never stepped.",
        caught_by="test_tells_skipped_from_the_scaler_alone[no_scaler]",
        says="ask the scaler whether it skipped",
        edits=(
            (
                "        skipped = _step(optimizer, scaler)\n",
                "        skipped = (scaler is None and not bool(grad_norm.isfinite())) or _step(optimizer, scaler)\n",
            ),
        ),
    ),
    Wrong(
        name="reads_the_skip_off_the_weights",
        belief="A step that was taken has moved the weights.",
        caught_by="test_tells_skipped_from_the_scaler_alone[rate_zero]",
        says="ask the scaler whether it skipped",
        edits=(
            (
                "        skipped = _step(optimizer, scaler)\n",
                "        before = [p.detach().clone() for p in parameters]\n"
                "        _step(optimizer, scaler)\n"
                "        skipped = all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))\n",
            ),
        ),
    ),
    Wrong(
        name="a_pass_more_in_an_epoch",
        belief="The loss to be returned is that of a pass without gradients.",
        caught_by="test_each_micro_batch_of_an_epoch_runs_once_and_may_be_a_list",
        says="a forward pass too many",
        edits=(
            (
                SHARE_3,
                SHARE_3 + "            with torch.no_grad():\n                model(inputs)\n",
            ),
        ),
    ),
    Wrong(
        name="another_rule_is_linear",
        belief="What is not the root is linear.",
        caught_by="test_scaled_lr_refuses_what_has_no_meaning[rule]",
        says="this input is not checked",
        edits=(
            (
                "    raise ValueError(f\"rule must be 'linear' or 'sqrt', not {rule!r}\")\n",
                "    return lr * new_batch_size / batch_size\n",
            ),
        ),
    ),
    Wrong(
        name="a_rate_of_zero",
        belief="Zero scaled is zero.",
        caught_by="test_scaled_lr_refuses_what_has_no_meaning[lr_zero]",
        says="this input is not checked",
        edits=(("    if not lr > 0:\n", "    if not lr >= 0:\n"),),
    ),
    Wrong(
        name="a_negative_rate",
        belief="The sign of the rate is the caller's.",
        caught_by="test_scaled_lr_refuses_what_has_no_meaning[lr_negative]",
        says="this input is not checked",
        edits=(("    if not lr > 0:\n", "    if not lr != 0 or math.isnan(lr):\n"),),
    ),
    Wrong(
        name="a_rate_of_nan",
        belief="lr <= 0 is the opposite of lr > 0.",
        caught_by="test_scaled_lr_refuses_what_has_no_meaning[lr_nan]",
        says="this input is not checked",
        edits=(("    if not lr > 0:\n", "    if lr <= 0:\n"),),
    ),
    Wrong(
        name="divides_by_a_batch_of_none",
        belief="Division by zero tells itself.",
        caught_by="test_scaled_lr_refuses_what_has_no_meaning[batch_size]",
        says="ZeroDivisionError",
        edits=(
            (
                "    for size in (batch_size, new_batch_size):\n",
                "    for size in (new_batch_size,):\n",
            ),
        ),
    ),
    Wrong(
        name="a_new_batch_of_any_size",
        belief="Only the old size is divided by.",
        caught_by="test_scaled_lr_refuses_what_has_no_meaning[new_batch_size]",
        says="this input is not checked",
        edits=(
            ("    for size in (batch_size, new_batch_size):\n", "    for size in (batch_size,):\n"),
        ),
    ),
    Wrong(
        name="shares_of_the_elements_in_an_epoch",
        belief="A micro-batch weighs as much as the numbers that are in it.",
        caught_by="test_a_sample_of_an_epoch_counts_once_however_long_it_is",
        says="by its elements, not by its samples",
        edits=(
            (
                FORWARD_3,
                FORWARD_3.replace(
                    "(len(inputs) / samples)",
                    "(targets.numel() / sum(y.numel() for _, y in batches))",
                ),
            ),
        ),
    ),
    Wrong(
        name="refuses_an_infinite_max_norm",
        belief="An infinite norm is no norm.",
        caught_by="test_clips_the_windows_true_gradient_once[endless-fp32]",
        says="max_norm must be positive",
        raises=ValueError,
        edits=(("not max_norm > 0:\n", "not 0 < max_norm < math.inf:\n"),),
    ),
    Wrong(
        name="a_new_scale_is_an_overflow",
        belief="The scale changes when a step was skipped.",
        caught_by="test_updates_the_scale_once_a_window",
        says="a scale that grows is taken for one that falls",
        edits=(
            ("    return scaler.get_scale() < scale", "    return scaler.get_scale() != scale"),
        ),
    ),
    Wrong(
        name="no_norm_for_a_skipped_window",
        belief="What was not stepped had no gradient.",
        caught_by="test_an_overflow_in_any_micro_batch_skips_the_window[middle]",
        says="no finite norm",
        edits=(
            (
                STEPPED_3,
                STEPPED_3
                + "        grad_norm = grad_norm * 0 if not skipped else torch.zeros(())\n",
            ),
        ),
    ),
    Wrong(
        name="an_empty_micro_batch_in_an_epoch",
        belief="A share of 0 samples is 0 (0 x nan is nan).",
        caught_by="test_a_bad_micro_batch_ends_the_epoch_before_its_window[empty]",
        says="this input is not checked",
        edits=(
            (
                "    for batch in batches:\n        _check_batch(batch)\n",
                "    for inputs, targets in batches:\n"
                "        if len(inputs) != len(targets):\n"
                '            raise ValueError(f"{len(inputs)}, {len(targets)}")\n',
            ),
        ),
    ),
    Wrong(
        name="two_of_three_in_an_epoch",
        belief="What follows inputs and targets is somebody else's.",
        caught_by="test_a_bad_micro_batch_ends_the_epoch_before_its_window[triple]",
        says="this input is not checked",
        edits=(
            (
                "    for batch in batches:\n        _check_batch(batch)\n",
                "    batches = [(batch[0], batch[1]) for batch in batches]\n"
                "    for batch in batches:\n        _check_batch(batch)\n",
            ),
        ),
    ),
    Wrong(
        name="clears_before_there_is_a_window",
        belief="An epoch starts without gradients.",
        caught_by="test_refuses_an_epoch_without_micro_batches[list]",
        says="gradients changed",
        edits=(
            (
                "    iterator, results = iter(",
                "    optimizer.zero_grad()\n    iterator, results = iter(",
            ),
        ),
    ),
    Wrong(
        name="leaves_the_gradients_of_what_the_model_lacks",
        belief="The optimizer's parameters are the model's.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[fp32]",
        says="the model's gradients are cleared, not the optimizer's",
        edits=((FINALLY_3, FINALLY_3.replace("optimizer", "model")),),
    ),
    Wrong(
        name="one_norm_and_one_clipped_group",
        belief="Each group is clipped by itself, and the first is the one that matters.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[bf16]",
        says="a group is not clipped",
        edits=((CLIP_3, CLIP_3.replace("(parameters,", '(optimizer.param_groups[0]["params"],')),),
    ),
    Wrong(
        name="clips_what_the_model_has",
        belief="The norm is over the optimizer's parameters; clip_grad_norm_ takes the model's.",
        caught_by="test_minds_frozen_unused_and_foreign_parameters[fp16]",
        says="or what only the optimizer knows",
        edits=((CLIP_3, CLIP_3.replace("(parameters,", "(list(model.parameters()),")),),
    ),
    Wrong(
        name="skips_in_bfloat16",
        belief="bfloat16 overflows as float16 does.",
        caught_by="test_tells_skipped_from_the_scaler_alone[bf16]",
        says="ask the scaler whether it skipped",
        edits=(
            (
                STEPPED_3,
                "        lost = dtype == torch.bfloat16 and not bool(grad_norm.isfinite())\n"
                "        skipped = lost or _step(optimizer, scaler)\n",
            ),
        ),
    ),
    Wrong(
        name="an_infinite_norm_is_an_error",
        belief="What cannot be clipped is an error where no scaler skips it.",
        caught_by="test_tells_skipped_from_the_scaler_alone[bf16]",
        says="non-finite",
        raises=RuntimeError,
        edits=(
            (
                CLIP_3,
                CLIP_3.replace(
                    "            clip",
                    "            grads = [p.grad for p in parameters if p.grad is not None]\n"
                    "            get_total_norm(grads, error_if_nonfinite=scaler is None)\n"
                    "            clip",
                ),
            ),
        ),
    ),
    Wrong(
        name="the_schedule_reads_the_norm",
        belief="A step with an infinite norm does not count.",
        caught_by="test_tells_skipped_from_the_scaler_alone[no_scaler]",
        says="whatever its norm",
        edits=(
            (
                SCHEDULE_3,
                SCHEDULE_3.replace("skipped:", "skipped and result.grad_norm.isfinite():"),
            ),
        ),
    ),
    # Part 4
    Wrong(
        name="never_steps_on_ranks",
        belief="DDP steps when it has synchronised.",
        caught_by="test_every_rank_steps_once_and_the_shares_add_up",
        says="a rank does not step",
        edits=((LOOP_4, LOOP_4.replace("    optimizer.step()\n", "")),),
    ),
    Wrong(
        name="returns_the_share_with_its_graph",
        belief="A scalar is small, so it can be kept.",
        caught_by="test_every_rank_steps_once_and_the_shares_add_up",
        says="without a graph",
        edits=((LOOP_4, LOOP_4.replace("loss.detach()", "loss")),),
    ),
    Wrong(
        name="returns_what_backward_was_called_on",
        belief="The loss is what backward() is called on.",
        caught_by="test_every_rank_steps_once_and_the_shares_add_up",
        says="multiplied by the number of ranks",
        edits=((LOOP_4, LOOP_4.replace("loss.detach()", "loss.detach() * ranks")),),
    ),
    Wrong(
        name="returns_the_ranks_own_mean",
        belief="Each rank reports the loss of its own tokens.",
        caught_by="test_every_rank_steps_once_and_the_shares_add_up",
        says="each rank returns its own mean",
        edits=((LOOP_4, LOOP_4.replace(".sum()\n", ".sum() * all_tokens / tokens\n")),),
    ),
    Wrong(
        name="lets_ddp_average",
        belief="DDP's average over the ranks is the mean that is wanted.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[tokens_12_and_1]",
        says="is not multiplied away",
        edits=((LOOP_4, LOOP_4.replace("(loss * ranks)", "loss")),),
    ),
    Wrong(
        name="mean_of_the_ranks_means",
        belief="Each rank has the mean over its tokens, and DDP averages.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[micro_batches_4_and_1]",
        says="a mean of the ranks' means",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace("/ all_tokens", "/ max(tokens, 1)").replace(
                    "(loss * ranks)", "loss"
                ),
            ),
        ),
    ),
    Wrong(
        name="counts_its_own_tokens_only",
        belief="The number of tokens in the window is what this rank sees.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[micro_batches_1_and_3]",
        says="a sum of the ranks' means",
        edits=((LOOP_4, LOOP_4.replace("/ all_tokens", "/ max(tokens, 1)")),),
    ),
    Wrong(
        name="does_not_divide_on_ranks",
        belief="Averaging is DDP's business.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[tokens_12_and_1]",
        says="not divided by their number",
        edits=((LOOP_4, LOOP_4.replace(" / all_tokens", "")),),
    ),
    Wrong(
        name="never_synchronises",
        belief="The whole window belongs in no_sync().",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[tokens_12_and_1]",
        says="nothing is synchronised",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(" if number < len(micro_batches) else nullcontext()", ""),
            ),
        ),
    ),
    Wrong(
        name="calls_the_module_inside",
        belief="model.module is the model.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[tokens_12_and_1]",
        says="nothing is synchronised",
        edits=((LOOP_4, LOOP_4.replace("model(inputs)", "model.module(inputs)")),),
    ),
    Wrong(
        name="synchronises_the_first",
        belief="One of the backward passes has to synchronise, and the first comes first.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[last_without_labels]",
        says="is not the sum over its tokens by the tokens of all",
        edits=((LOOP_4, LOOP_4.replace("number < len(micro_batches)", "number > 1")),),
    ),
    Wrong(
        name="leaves_out_micro_batches_without_labels",
        belief="Where nothing is labelled there is nothing to do.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[last_without_labels]",
        says="time-out: rank 0 is still",
        edits=(
            (
                LOOP_4,
                "        if not (targets != ignore_index).any():\n            continue\n"
                + LOOP_4.replace("stack(shares)", "stack(shares or [torch.zeros(())])"),
            ),
        ),
    ),
    Wrong(
        name="a_rank_without_labels_does_not_step",
        belief="Who adds nothing has nothing to step with.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[rank_1_without_labels]",
        says="only one of them has stepped",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(
                    "    optimizer.step()\n", "    if tokens:\n        optimizer.step()\n"
                ),
            ),
        ),
    ),
    Wrong(
        name="synchronises_the_first_window_only",
        belief="Ranks that start alike and see like data stay alike.",
        caught_by="test_trains_as_one_process_over_three_windows",
        says="a later window is not synchronised",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace("if number <", "if optimizer.state or number <"),
            ),
        ),
    ),
    Wrong(
        name="counts_minus_100_on_ranks",
        belief="-100 is what PyTorch ignores.",
        caught_by="test_honours_ignore_index_on_every_rank[3]",
        says="ignore_index is not heeded",
        edits=(
            (
                "tokens = 0 if problem else _count_tokens(micro_batches, ignore_index)",
                "tokens = 0 if problem else _count_tokens(micro_batches, -100)",
            ),
        ),
    ),
    Wrong(
        name="trains_on_the_ignored_on_ranks",
        belief="The count heeds ignore_index; the loss has its default.",
        caught_by="test_honours_ignore_index_on_every_rank[0]",
        says="ignore_index is not heeded",
        edits=((LOOP_4, LOOP_4.replace("targets, ignore_index)", "targets, -100)")),),
    ),
    Wrong(
        name="synchronises_every_micro_batch",
        belief="DDP knows by itself when a window ends.",
        caught_by="test_sends_the_gradients_once_a_window[4]",
        says="gradients are sent for every micro-batch",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace("model.no_sync() if number < len(micro_batches) else ", ""),
            ),
        ),
    ),
    Wrong(
        name="forward_outside_no_sync",
        belief="Gradients are sent in the backward pass, so no_sync() is for the backward pass.",
        caught_by="test_sends_the_gradients_once_a_window[4]",
        says="forward too belongs in no_sync()",
        edits=(
            (
                LOOP_4,
                """        loss = _sum_over_tokens(model(inputs), targets, ignore_index) / all_tokens
        with model.no_sync() if number < len(micro_batches) else nullcontext():
            (loss * ranks).backward()
"""
                + LOOP_4[LOOP_4.index("        shares") :],
            ),
        ),
    ),
    Wrong(
        name="sends_each_gradient_by_itself",
        belief="dist.all_reduce() on every gradient is what DDP does.",
        caught_by="test_sends_the_gradients_once_a_window[1]",
        says="each tensor is sent by itself",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(" if number < len(micro_batches) else nullcontext()", "")
                .replace("(loss * ranks)", "loss")
                .replace(
                    "    optimizer.step()\n",
                    "    for p in model.parameters():\n        if p.grad is not None:\n"
                    "            dist.all_reduce(p.grad)\n    optimizer.step()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="gathers_objects_for_the_counts",
        belief="all_gather_object() is the simple way to share two numbers.",
        caught_by="test_sends_the_gradients_once_a_window[1]",
        says="counts are more than 8 numbers",
        edits=(
            (
                REDUCE_4,
                """    every: list[object] = [None] * dist.get_world_size(model.process_group)
    dist.all_gather_object(every, counts.tolist(), group=model.process_group)
    counts = torch.tensor(every).sum(0)
""",
            ),
        ),
    ),
    Wrong(
        name="one_backward_at_the_end_on_ranks",
        belief="One backward() for the window synchronises once, without no_sync().",
        caught_by="test_a_ranks_peak_is_the_same_for_2_and_8_micro_batches",
        says="graphs are kept until one backward pass at the end",
        edits=(
            (
                LOOP_4,
                """        loss = _sum_over_tokens(model(inputs), targets, ignore_index) / all_tokens
        shares.append(loss)
    (torch.stack(shares).sum() * ranks).backward()
    optimizer.step()
    return torch.stack(shares).sum().detach()
""",
            ),
        ),
    ),
    Wrong(
        name="never_clears_on_ranks",
        belief="Gradients are None at the start, so there is nothing to clear.",
        caught_by="test_a_window_on_ranks_starts_without_gradients",
        says="gradients from before the window are in it",
        edits=((HEAD_4, HEAD_4.replace("    optimizer.zero_grad()\n", "")),),
    ),
    Wrong(
        name="clears_the_model_on_ranks",
        belief="The optimizer's parameters are the model's.",
        caught_by="test_a_window_on_ranks_starts_without_gradients",
        says="are to be dropped, not zeroed",
        edits=((HEAD_4, HEAD_4.replace("optimizer.zero_grad()", "model.zero_grad()")),),
    ),
    Wrong(
        name="raises_before_the_others_know",
        belief="A bad window raises at once.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[bad_shapes-1]",
        says="time-out: rank 0 is still",
        edits=((PROBLEM_4, "        raise\n"),),
    ),
    Wrong(
        name="the_good_ranks_go_on",
        belief="A rank with a good window need not care for the others.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[bad_shapes-0]",
        says="rank 1 is still at line",
        edits=(("    if bad_ranks or all_tokens == 0:\n", "    if all_tokens == 0:\n"),),
    ),
    Wrong(
        name="a_rank_without_micro_batches_is_fine",
        belief="A rank may have none: its sum is 0.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[no_micro_batch-1]",
        says="on rank 1",
        edits=(
            (
                """        if not micro_batches:
            raise ValueError(f"a window needs a micro-batch, and has {len(micro_batches)}")
    except""",
                "    except",
            ),
        ),
    ),
    Wrong(
        name="one_message_for_all",
        belief="All ranks raise, so all may raise the same.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[bad_shapes-1]",
        says="does not say which value was wrong",
        edits=(("    if problem:\n        raise problem\n", ""),),
    ),
    Wrong(
        name="clears_before_it_asks",
        belief="Old gradients are of no use, so they may go first.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[no_micro_batch-0]",
        says="this rank has begun its window",
        edits=((REDUCE_4, "    optimizer.zero_grad()\n" + REDUCE_4),),
    ),
    Wrong(
        name="at_least_one_token_on_ranks",
        belief="max(tokens, 1) is the usual guard.",
        caught_by="test_no_labelled_token_on_any_rank_is_refused_by_all",
        says="no error",
        edits=(
            (
                "    if bad_ranks or all_tokens == 0:\n",
                "    all_tokens = max(all_tokens, 1)\n    if bad_ranks:\n",
            ),
        ),
    ),
    Wrong(
        name="no_sync_before_it_asks",
        belief="The window starts in no_sync(), and its end puts things right.",
        caught_by="test_trains_on_after_a_refused_window",
        says="something of the refused window is left",
        edits=(
            (
                REDUCE_4,
                "    sync = model.require_backward_grad_sync\n"
                "    model.require_backward_grad_sync = False\n" + REDUCE_4,
            ),
            (
                "    ranks = dist.get_world_size(model.process_group)\n",
                "    ranks = dist.get_world_size(model.process_group)\n"
                "    model.require_backward_grad_sync = sync\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_ddp_without_synchronisation",
        belief="The flag is set again at the next window.",
        caught_by="test_ddp_synchronises_again_after_a_window",
        says="no_sync() is entered and not left",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(
                    "        with model.no_sync() if number < len(micro_batches) else nullcontext():\n",
                    "        model.require_backward_grad_sync = number == len(micro_batches)\n"
                    "        with nullcontext():\n",
                ).replace(
                    "    optimizer.step()\n",
                    "    model.require_backward_grad_sync = False\n    optimizer.step()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="counts_in_the_default_group",
        belief="There is one process group.",
        caught_by="test_counts_the_ranks_of_the_models_process_group",
        says="not those of model.process_group",
        edits=((REDUCE_4, "    dist.all_reduce(counts)\n"),),
    ),
    Wrong(
        name="ranks_of_the_default_group",
        belief="The world is all there is.",
        caught_by="test_counts_the_ranks_of_the_models_process_group",
        says="the world's size is taken",
        edits=(("dist.get_world_size(model.process_group)", "dist.get_world_size()"),),
    ),
    Wrong(
        name="two_ranks",
        belief="There are two ranks.",
        caught_by="test_counts_the_ranks_of_the_models_process_group",
        says="the world's size is taken",
        edits=(("dist.get_world_size(model.process_group)", "2"),),
    ),
    Wrong(
        name="all_reduces_the_loss_too",
        belief="Each rank returns an equal part of the loss: the parts add up.",
        caught_by="test_every_rank_steps_once_and_the_shares_add_up",
        says="the mean of what all return",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(
                    "    return torch.stack(shares).sum()\n",
                    "    total = torch.stack(shares).sum()\n"
                    "    dist.all_reduce(total, group=model.process_group)\n"
                    "    return total / ranks\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="the_share_of_no_tokens_is_nan",
        belief="A rank's share is its mean times its part of the tokens.",
        caught_by="test_the_gradient_is_that_of_one_process_with_all_the_data[rank_1_without_labels]",
        says="has a share of 0",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(".sum()\n", ".sum() / torch.tensor(tokens) * tokens\n"),
            ),
        ),
    ),
    Wrong(
        name="switches_to_train_mode_on_ranks",
        belief="A training step starts with model.train().",
        caught_by="test_a_window_on_ranks_starts_without_gradients",
        says="train() is called",
        edits=((HEAD_4, "    model.train()\n" + HEAD_4),),
    ),
    Wrong(
        name="a_call_for_each_count",
        belief="A small all-reduce costs nothing (it costs a round trip).",
        caught_by="test_sends_the_gradients_once_a_window[1]",
        says="flags or losses have calls of their own",
        edits=(
            (
                REDUCE_4,
                "    for count in counts.unbind():\n"
                "        dist.all_reduce(count, group=model.process_group)\n",
            ),
        ),
    ),
    Wrong(
        name="sends_the_gradients_by_hand",
        belief="One all-reduce of all gradients in one vector is what DDP does.",
        caught_by="test_sends_the_gradients_once_a_window[4]",
        says="gradients are sent by hand",
        edits=(
            (
                LOOP_4,
                LOOP_4.replace(" if number < len(micro_batches) else nullcontext()", "")
                .replace("(loss * ranks)", "loss")
                .replace(
                    "    optimizer.step()\n",
                    "    grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
                    "    flat = torch.cat([g.flatten() for g in grads])\n"
                    "    dist.all_reduce(flat, group=model.process_group)\n"
                    "    parts = flat.split([g.numel() for g in grads])\n"
                    "    for g, part in zip(grads, parts, strict=True):\n"
                    "        g.copy_(part.view_as(g))\n"
                    "    optimizer.step()\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="an_empty_micro_batch_on_a_rank",
        belief="Inputs and targets of one shape are good.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[an_empty_one-1]",
        says="this input is not checked",
        edits=(
            (
                "    if inputs.shape != targets.shape or inputs.numel() == 0:\n",
                "    if inputs.shape != targets.shape:\n",
            ),
        ),
    ),
    Wrong(
        name="unpacks_what_comes_on_a_rank",
        belief="What can be unpacked into two is a pair.",
        caught_by="test_a_bad_window_on_one_rank_is_refused_by_all[inputs_only-0]",
        says="before it knew of the others",
        edits=((TOKENS_PAIR, TOKENS_PAIR.replace("_pair(batch)", "batch")),),
    ),
]
