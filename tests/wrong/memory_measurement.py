"""Mistakes in memory_measurement, each with the spec that must catch it."""

from kit.answers.loading import Wrong

WRONG = [
    # Part 1
    Wrong(
        name="gradients_taken_as_large_as_parameters",
        belief="Every parameter has a gradient, so gradients take what parameters take.",
        caught_by="test_shows_what_set_to_none_saves",
        says="gradients after set_to_none=True",
        edits=(
            (
                "gradients=_new_bytes([p.grad for p in parameters], seen),",
                "gradients=_new_bytes(parameters, set()),",
            ),
        ),
    ),
    Wrong(
        name="forgets_the_gradients",
        belief="A model is its parameters and buffers.",
        caught_by="test_counts_parameters_gradients_and_momentum",
        says="(parameters, gradients, buffers, optimizer)",
        edits=(("gradients=_new_bytes([p.grad for p in parameters], seen),", "gradients=0,"),),
    ),
    Wrong(
        name="adam_is_always_two_moments",
        belief="Adam's state is two fp32 numbers a parameter, from the first moment on.",
        caught_by="test_adam_has_no_state_before_its_first_step_and_two_moments_after",
        says="before the first step",
        edits=(
            (
                "optimizer=_new_bytes(state, seen),",
                "optimizer=8 * sum(p.numel() for p in parameters) if optimizer else 0,",
            ),
        ),
    ),
    Wrong(
        name="four_bytes_for_every_element",
        belief="A number in PyTorch is 4 bytes.",
        caught_by="test_counts_each_dtype_at_its_own_size",
        says="bfloat16",
        edits=(("total += storage.nbytes()", "total += value.numel() * 4"),),
    ),
    Wrong(
        name="counts_tensors_by_identity",
        belief="Two Parameter objects are two pieces of memory.",
        caught_by="test_counts_tied_parameters_once",
        says="three tied weights",
        edits=(
            ("if storage._cdata not in seen:", "if id(value) not in seen:"),
            ("seen.add(storage._cdata)", "seen.add(id(value))"),
        ),
    ),
    Wrong(
        name="counts_the_elements_of_a_view",
        belief="numel() * element_size() is what a tensor takes.",
        caught_by="test_counts_a_view_as_the_storage_behind_it",
        says="expanded and a strided buffer",
        edits=(("total += storage.nbytes()", "total += value.numel() * value.element_size()"),),
    ),
    Wrong(
        name="each_kind_starts_afresh",
        belief="Kinds of state never share memory.",
        caught_by="test_counts_a_storage_under_one_kind_only",
        says="flat buffer",
        edits=(
            (
                "buffers=_new_bytes(model.buffers(), seen),",
                "buffers=_new_bytes(model.buffers(), set()),",
            ),
        ),
    ),
    Wrong(
        name="only_what_is_trained",
        belief="Frozen parameters cost nothing in training.",
        caught_by="test_counts_frozen_parameters_and_hidden_buffers",
        says="frozen layer",
        edits=(
            (
                "    parameters = list(model.parameters())\n    state",
                "    parameters = [p for p in model.parameters() if p.requires_grad]\n    state",
            ),
        ),
    ),
    Wrong(
        name="state_dict_for_the_buffers",
        belief="state_dict() lists everything that a model holds.",
        caught_by="test_counts_frozen_parameters_and_hidden_buffers",
        says="non-persistent buffer",
        edits=(
            (
                "buffers=_new_bytes(model.buffers(), seen),",
                "buffers=_new_bytes(model.state_dict().values(), seen),",
            ),
        ),
    ),
    Wrong(
        name="only_the_top_of_the_optimizer_state",
        belief="Optimizer state is a dict of tensors for each parameter.",
        caught_by="test_finds_optimizer_state_however_deep",
        says="lists, dicts and tuples",
        edits=(
            (
                "state = tree_leaves(list(optimizer.state.values())) if optimizer else []",
                "state = [t for s in optimizer.state.values() for t in s.values()]"
                " if optimizer else []",
            ),
        ),
    ),
    Wrong(
        name="takes_anything_for_a_model",
        belief="Duck typing will tell the caller what is wrong.",
        caught_by="test_refuses_what_is_no_model_or_optimizer[model]",
        says="the input is not checked",
        edits=(
            (
                "    if not isinstance(model, nn.Module):\n"
                '        raise TypeError(f"model must be an nn.Module, not '
                '{type(model).__name__}")\n    if optimizer is not None',
                "    if optimizer is not None",
            ),
        ),
    ),
    # Part 2
    Wrong(
        name="counts_after_the_graph_is_gone",
        belief="The result is not needed: the hooks have seen all there is.",
        caught_by="test_counts_what_an_mlp_saves",
        says="the graph is gone when you count",
        edits=(
            ("        result = forward()\n", "        forward()\n"),
            ("    del result", "    #"),
        ),
    ),
    Wrong(
        name="sums_every_saved_tensor",
        belief="What autograd saves is the sum over the saved tensors.",
        caught_by="test_counts_a_storage_once_and_in_full",
        says="tensors are counted",
        edits=(
            (
                "total = _new_bytes([box.tensor for box in boxes], state)",
                "total = sum(_new_bytes([box.tensor], set(state)) for box in boxes)",
            ),
        ),
    ),
    Wrong(
        name="four_bytes_for_every_saved_element",
        belief="Saved activations are float32.",
        caught_by="test_counts_saved_masks_and_indices_at_their_own_size",
        says="bool mask",
        edits=(
            (
                "total = _new_bytes([box.tensor for box in boxes], state)",
                "total = 4 * sum(box.tensor.numel() for box in boxes)",
            ),
        ),
    ),
    Wrong(
        name="leaves_out_parameters_by_type",
        belief="isinstance(t, nn.Parameter) tells a weight from an activation.",
        caught_by="test_never_counts_parameters_or_buffers",
        says="transposed view",
        edits=(
            ("_new_bytes([*model.parameters(), *model.buffers()], state)", "pass"),
            (
                "[box.tensor for box in boxes]",
                "[box.tensor for box in boxes if not isinstance(box.tensor, nn.Parameter)]",
            ),
        ),
    ),
    Wrong(
        name="leaves_out_parameters_but_not_buffers",
        belief="Only parameters are there anyway.",
        caught_by="test_never_counts_parameters_or_buffers",
        says="batch norm",
        edits=(("[*model.parameters(), *model.buffers()]", "model.parameters()"),),
    ),
    Wrong(
        name="counts_every_operation_of_the_forward",
        belief="Whatever the forward pass computes is held until the backward pass.",
        caught_by="test_shows_what_checkpointing_saves",
        says="block",
        edits=(
            (
                "    def pack(tensor: Tensor) -> _Box:",
                "    class Every(TorchDispatchMode):\n"
                "        def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
                "            result = func(*args, **(kwargs or {}))\n"
                "            kept.extend(tree_leaves((args, result)))\n"
                "            return result\n\n"
                "    kept: list[Any] = []\n\n"
                "    def pack(tensor: Tensor) -> _Box:",
            ),
            ("with saved_tensors_hooks(pack, lambda box: box.tensor):", "with Every():"),
            ("[box.tensor for box in boxes]", "kept"),
        ),
    ),
    Wrong(
        name="adds_up_in_the_pack_hook",
        belief="Every tensor that a pack hook sees is held until the backward pass.",
        caught_by="test_does_not_count_a_graph_that_is_dropped_on_the_way",
        says="its graph was freed",
        edits=(("boxes: weakref.WeakSet[_Box] = weakref.WeakSet()", "boxes: set[_Box] = set()"),),
    ),
    Wrong(
        name="hooks_give_back_another_tensor",
        belief="What the unpack hook returns is only looked at, not computed with.",
        caught_by="test_runs_the_forward_once_and_lets_the_caller_go_backward",
        says="another tensor",
        edits=(("lambda box: box.tensor)", "lambda box: torch.zeros_like(box.tensor))"),),
    ),
    Wrong(
        name="runs_the_forward_twice",
        belief="A first run warms up, a second one is counted.",
        caught_by="test_runs_the_forward_once_and_lets_the_caller_go_backward",
        says="runs of forward",
        edits=(
            ("        result = forward()\n", "        forward()\n        result = forward()\n"),
        ),
    ),
    Wrong(
        name="expects_one_tensor",
        belief="A forward pass returns a tensor.",
        caught_by="test_sees_a_result_of_any_shape_and_nothing_without_a_graph",
        says="no attribute 'grad_fn'",
        raises=AttributeError,
        edits=(
            (
                "    del result  # only now may the graph go\n    return total",
                "    return total if result.grad_fn is not None else 0",
            ),
        ),
    ),
    Wrong(
        name="hooks_without_with",
        belief="Entering and leaving by hand is the same as `with`.",
        caught_by="test_an_error_in_forward_reaches_the_caller_and_leaves_no_hook",
        says="hook is still in force",
        edits=(
            (
                "    with saved_tensors_hooks(pack, lambda box: box.tensor):\n"
                "        result = forward()\n",
                "    hooks = saved_tensors_hooks(pack, lambda box: box.tensor)\n"
                "    hooks.__enter__()\n"
                "    result = forward()\n"
                "    hooks.__exit__()\n",
            ),
        ),
    ),
    Wrong(
        name="the_pack_hook_keeps_the_graph",
        belief="A pack hook may return the tensor that it was given.",
        caught_by="test_lets_go_of_the_graph_afterwards",
        says="the graph holds itself",
        edits=(("box = _Box(tensor.detach())", "box = _Box(tensor)"),),
    ),
    Wrong(
        name="calls_whatever_it_is_given",
        belief="A tensor as `forward` will fail by itself.",
        caught_by="test_refuses_what_is_no_forward_or_model[model]",
        says="the input is not checked",
        edits=(
            (
                "    if not isinstance(model, nn.Module):\n"
                '        raise TypeError(f"model must be an nn.Module, not '
                '{type(model).__name__}")\n    # The graph owns',
                "    # The graph owns",
            ),
        ),
    ),
    # Part 3
    Wrong(
        name="reads_memory_when_the_step_is_over",
        belief="What is allocated after the step is the peak (memory_allocated for max).",
        caught_by="test_reports_baseline_peak_and_what_is_retained",
        says="a temporary is missed",
        edits=(
            (
                "return PeakMemory(baseline, counter.peak,",
                "return PeakMemory(baseline, counter.live,",
            ),
            (
                "peak = torch.cuda.max_memory_allocated(device)",
                "peak = torch.cuda.memory_allocated(device)",
            ),
        ),
    ),
    Wrong(
        name="never_subtracts_what_is_freed",
        belief="The peak is the sum of all allocations.",
        caught_by="test_gives_back_what_is_freed",
        says="freed storages stay in the sum",
        edits=(("        self.live -= size\n", ""),),
    ),
    Wrong(
        name="every_result_is_new_memory",
        belief="An operation that returns a tensor has allocated one.",
        caught_by="test_a_view_or_an_in_place_result_is_no_memory",
        says="each result counts as new",
        edits=(
            (
                "                if key not in self.storages:\n",
                "                key = id(value)\n                if key not in self.storages:\n",
            ),
            ("weakref.finalize(storage, self.drop", "weakref.finalize(value, self.drop"),
        ),
    ),
    Wrong(
        name="adds_up_what_exists",
        belief="The baseline is the sum over the tensors that the caller lists.",
        caught_by="test_existing_storages_count_once",
        says="not their storages",
        edits=(
            (
                "    counter.add(existing)\n    baseline = counter.live\n",
                "    existing = list(existing)\n    counter.add(existing)\n"
                "    baseline = sum(t.nbytes for t in existing)\n",
            ),
        ),
    ),
    Wrong(
        name="watches_the_forward_pass_only",
        belief="Activations are made in the forward pass, so that is where the peak is.",
        caught_by="test_counts_the_backward_pass",
        says="the mode is left before backward",
        edits=(
            (
                "        self.add(tree_leaves(result))\n        return result",
                "        if torch.is_grad_enabled():\n            self.add(tree_leaves(result))\n"
                "        return result",
            ),
            (
                "        result = func(*args, **(kwargs or {}))\n",
                "        result = func(*args, **(kwargs or {}))\n"
                "        if torch._C._current_graph_task_id() != -1:\n            return result\n",
            ),
        ),
    ),
    Wrong(
        name="skips_results_that_are_lists",
        belief="An operation returns a tensor.",
        caught_by="test_agrees_with_the_allocator[normalisation]",
        says="memory is missed",
        edits=(("self.add(tree_leaves(result))", "self.add([result])"),),
    ),
    Wrong(
        name="keeps_every_storage_alive",
        belief="A list of what was allocated does no harm.",
        caught_by="test_shows_what_checkpointing_takes_off_the_peak",
        says="what is freed between the blocks",
        edits=(
            (
                "                    self.live += size\n",
                "                    self.live += size\n                    KEPT.append(storage)\n",
            ),
            ("class _LiveBytes", "KEPT: list[Any] = []\n\n\nclass _LiveBytes"),
        ),
    ),
    Wrong(
        name="one_counter_for_all_phases",
        belief="A counter can be made once and used again.",
        caught_by="test_a_second_smaller_phase_reports_its_own_peak",
        says="the peak is not reset",
        edits=(
            ("    counter = _LiveBytes()\n", "    counter = _COUNTER\n"),
            ("# Part 4\n", "_COUNTER = _LiveBytes()\n\n\n# Part 4\n"),
        ),
    ),
    Wrong(
        name="keeps_the_result_until_after_the_reading",
        belief="The step's result belongs to what the step retains.",
        caught_by="test_drops_the_result_and_runs_the_step_once",
        says="kept too long",
        edits=(
            ("    with counter:\n        step()\n", "    with counter:\n        result = step()\n"),
            (
                "    return PeakMemory(baseline, counter.peak, counter.live - baseline)",
                "    reading = PeakMemory(baseline, counter.peak, counter.live - baseline)\n"
                "    del result\n    return reading",
            ),
        ),
    ),
    Wrong(
        name="warms_up_first",
        belief="A warm-up run makes the reading cleaner.",
        caught_by="test_drops_the_result_and_runs_the_step_once",
        says="runs of the step",
        edits=(
            (
                "    with counter:\n        step()\n",
                "    step()\n    with counter:\n        step()\n",
            ),
        ),
    ),
    Wrong(
        name="holds_on_to_what_existed",
        belief="A list of the existing tensors is needed for the second reading.",
        caught_by="test_freeing_what_existed_is_negative",
        says="never taken off",
        edits=(
            (
                "    counter = _LiveBytes()\n",
                "    existing = list(existing)\n    counter = _LiveBytes()\n",
            ),
        ),
    ),
    Wrong(
        name="mode_without_with",
        belief="Entering and leaving by hand is the same as `with`.",
        caught_by="test_an_error_in_the_step_reaches_the_caller_and_leaves_no_mode",
        says="no dispatch mode in force",
        edits=(
            (
                "    with counter:\n        step()\n",
                "    counter.__enter__()\n    step()\n    counter.__exit__(None, None, None)\n",
            ),
        ),
    ),
    Wrong(
        name="measures_any_device_as_if_it_were_the_cpu",
        belief="A device that is not cuda is the cpu.",
        caught_by="test_refuses_a_device_that_it_cannot_measure[mps]",
        says="for device",
        edits=(('    if device.type == "cpu":\n', '    if device.type != "cuda":\n'),),
    ),
    Wrong(
        name="meta_tensors_are_memory",
        belief="A tensor has nbytes, so it takes them.",
        caught_by="test_memory_of_another_device_does_not_count",
        says="a size and no memory",
        edits=((" and value.is_cpu:", ":"),),
    ),
    Wrong(
        name="no_reset_of_the_cuda_peak",
        belief="max_memory_allocated is the peak of what I am looking at.",
        caught_by="test_does_not_report_a_peak_from_before_the_step",
        says="reset_peak_memory_stats",
        edits=(("    torch.cuda.reset_peak_memory_stats(device)\n", ""),),
    ),
    # Part 4
    Wrong(
        name="amp_halves_weights_and_gradients",
        belief="Mixed precision keeps weights and gradients in 16 bits (an article's estimate).",
        caught_by="test_knows_the_bytes_a_parameter_of_each_recipe[amp_adam-16]",
        says="AMP halves neither",
        edits=(('"amp_adam": (32, 32, 64)', '"amp_adam": (16, 16, 64)'),),
    ),
    Wrong(
        name="forgets_the_master_copy",
        belief="The master copy is the weights.",
        caught_by="test_has_the_figures_of_the_zero_paper",
        says="optimizer's 12",
        edits=(('"master_adam": (16, 16, 96)', '"master_adam": (16, 16, 64)'),),
    ),
    Wrong(
        name="several_ranks_mean_zero",
        belief="Where there are several ranks, the optimizer state is sharded.",
        caught_by="test_divides_nothing_unless_told_to",
        says="the defaults are stage 0",
        edits=(("    zero_stage: int = 0,", "    zero_stage: int = 1,"),),
    ),
    Wrong(
        name="divides_bytes_instead_of_padding_shards",
        belief="A rank holds its share of the bytes.",
        caught_by="test_pads_shards_to_one_size",
        says="ceil(n / ranks)",
        edits=(
            ("shard = -(-count // ranks)", "shard = count / ranks"),
            ("return -(-total // 8)", "return -(-int(total) // 8)"),
        ),
    ),
    Wrong(
        name="gradients_for_frozen_weights",
        belief="LoRA's frozen weights still take a gradient each.",
        caught_by="test_adds_adapters_to_frozen_weights",
        says="no gradient and no moments",
        edits=(('"lora_16bit": (16, 0, 0)', '"lora_16bit": (16, 16, 0)'),),
    ),
    Wrong(
        name="one_moment_for_adam",
        belief="Adam keeps one running average.",
        caught_by="test_is_what_a_trained_model_really_holds[adam]",
        says="'adam' holds after a step",
        edits=(('    "adam": (32, 32, 64)', '    "adam": (32, 32, 32)'),),
    ),
    Wrong(
        name="stage_two_leaves_the_gradients_whole",
        belief="ZeRO-2 divides what ZeRO-1 divides, only faster.",
        caught_by="test_shows_what_each_stage_saves",
        says="stage 2",
        edits=(("shard if zero_stage >= 2", "shard if zero_stage >= 3"),),
    ),
    Wrong(
        name="rounds_through_a_float",
        belief="Division and ceil are exact.",
        caught_by="test_stays_exact_for_very_large_counts",
        says="53 bits",
        edits=(("shard = -(-count // ranks)", "shard = int(count / ranks + 0.999)"),),
    ),
    Wrong(
        name="an_unknown_recipe_is_adam",
        belief="A default is friendlier than an error.",
        caught_by="test_refuses_bad_input[unknown_recipe]",
        says="this input is not checked",
        edits=(
            ("_BITS[recipe]", "_BITS.get(recipe, (32, 32, 64))"),
            (
                "    if recipe not in _BITS:\n"
                '        raise ValueError(f"recipe must be one of '
                "{', '.join(_BITS)}, not {recipe!r}\")\n",
                "",
            ),
        ),
    ),
    # What a reader of the specs found that they accepted.
    Wrong(
        name="data_ptr_of_tensor",
        belief="data_ptr() tells one piece of memory from another.",
        caught_by="test_knows_a_storage_by_itself_not_by_where_a_view_starts",
        says="where a view starts",
        edits=(
            (
                "            if storage._cdata not in seen:\n                seen.add(storage._cdata)",
                "            if value.data_ptr() not in seen:\n                seen.add(value.data_ptr())",
            ),
        ),
    ),
    Wrong(
        name="data_ptr_of_storage",
        belief="A storage is known by its address.",
        caught_by="test_knows_a_storage_by_itself_not_by_where_a_view_starts",
        says="meta",
        edits=(
            (
                "            if storage._cdata not in seen:\n                seen.add(storage._cdata)",
                "            if storage.data_ptr() not in seen:\n                seen.add(storage.data_ptr())",
            ),
        ),
    ),
    Wrong(
        name="optimizer_afresh",
        belief="Optimizer state is never a gradient.",
        caught_by="test_counts_state_that_is_a_gradient_once_and_no_hyperparameters",
        says="a count of its own",
        edits=(("optimizer=_new_bytes(state, seen)", "optimizer=_new_bytes(state, set())"),),
    ),
    Wrong(
        name="optimizer_state_dict_leaves",
        belief="state_dict() is the state.",
        caught_by="test_counts_state_that_is_a_gradient_once_and_no_hyperparameters",
        says="param_groups are counted",
        edits=(
            ("tree_leaves(list(optimizer.state.values()))", "tree_leaves(optimizer.state_dict())"),
        ),
    ),
    Wrong(
        name="model_filtered_before_forward",
        belief="Weights are saved from where they start.",
        caught_by="test_knows_a_storage_by_itself_not_by_an_address_in_it",
        says="where a view starts",
        edits=(
            (
                "    with saved_tensors_hooks(pack, lambda box: box.tensor):\n",
                "    known = {p.data_ptr() for p in [*model.parameters(), *model.buffers()]}\n    with saved_tensors_hooks(pack, lambda box: box.tensor):\n",
            ),
            ("    _new_bytes([*model.parameters(), *model.buffers()], state)\n", ""),
            (
                "[box.tensor for box in boxes]",
                "[box.tensor for box in boxes if box.tensor.data_ptr() not in known]",
            ),
        ),
    ),
    Wrong(
        name="weakref_to_storage",
        belief="A storage that lives is held by the graph.",
        caught_by="test_does_not_count_what_lives_for_another_reason",
        says="ask",
        edits=(
            ("    boxes: weakref.WeakSet[_Box] = weakref.WeakSet()\n", "    refs = []\n"),
            (
                "        box = _Box(tensor.detach())\n        boxes.add(box)\n        return box\n",
                "        refs.append(weakref.ref(tensor.untyped_storage()))\n        return _Box(tensor.detach())\n",
            ),
            (
                "    total = _new_bytes([box.tensor for box in boxes], state)\n",
                "    alive = {s._cdata: s.nbytes() for s in (r() for r in refs) if s is not None}\n    total = sum(n for k, n in alive.items() if k not in state)\n",
            ),
        ),
    ),
    Wrong(
        name="existing_view_elements",
        belief="A view is as large as its elements.",
        caught_by="test_the_peak_is_never_below_the_baseline",
        says="elements of a view",
        edits=(
            (
                "key, size = storage._cdata, storage.nbytes()",
                "key, size = storage._cdata, value.nbytes",
            ),
        ),
    ),
    Wrong(
        name="peak_from_operations_only",
        belief="The peak is the highest after an operation.",
        caught_by="test_the_peak_is_never_below_the_baseline",
        says="operations only",
        edits=(
            (
                "    counter.add(existing)\n    baseline = counter.live\n",
                "    counter.add(existing)\n    baseline = counter.live\n    counter.peak = 0\n",
            ),
        ),
    ),
    Wrong(
        name="trainable_truthy",
        belief="0 adapters are no adapters given.",
        caught_by="test_nought_is_a_count_and_half_bytes_are_exact",
        says="trainable",
        raises=ValueError,
        edits=(("if (trainable is not None) != recipe", "if bool(trainable) != recipe"),),
    ),
    Wrong(
        name="refuses_zero_params",
        belief="A model has parameters.",
        caught_by="test_nought_is_a_count_and_half_bytes_are_exact",
        says="negative",
        raises=ValueError,
        edits=(("        if count < 0:\n", "        if count < (name != 'zero_stage'):\n"),),
    ),
    Wrong(
        name="trainable_type_unchecked",
        belief="Only the main count needs a type.",
        caught_by="test_refuses_bad_input[half_adapters]",
        says="not checked",
        edits=(
            (
                '    if trainable is not None:\n        counts["trainable"] = trainable\n',
                '    if trainable is not None and trainable < 0:\n        raise ValueError(f"trainable is {trainable}")\n',
            ),
        ),
    ),
    Wrong(
        name="stage_type_unchecked",
        belief="1.0 in (0, 1, 2, 3) is True, so it is a stage.",
        caught_by="test_refuses_bad_input[float_stage]",
        says="not checked",
        edits=(
            (
                'counts = {"n_params": n_params, "zero_stage": zero_stage, "ranks": ranks}',
                'counts = {"n_params": n_params, "ranks": ranks}\n    if zero_stage not in (0, 1, 2, 3):\n        raise ValueError(f"zero_stage must be 0 to 3, not {zero_stage}")',
            ),
        ),
    ),
    Wrong(
        name="bool_checked_for_params_only",
        belief="Nobody passes True for a number of ranks.",
        caught_by="test_refuses_bad_input[bool_ranks]",
        says="not checked",
        edits=(("or isinstance(count, bool)", "or count is True and name == 'n_params'"),),
    ),
    Wrong(
        name="four_bit_not_divided",
        belief="Quantised weights are too small to shard.",
        caught_by="test_nought_is_a_count_and_half_bytes_are_exact",
        says="4-bit shard",
        edits=(
            (
                "    total = weights * (shard if zero_stage >= 3 else count)\n",
                "    total = weights * (shard if zero_stage >= 3 and weights > 4 else count)\n",
            ),
        ),
    ),
    Wrong(
        name="half_byte_down_at_stage3",
        belief="Half a byte more or less does not matter.",
        caught_by="test_nought_is_a_count_and_half_bytes_are_exact",
        says="4-bit shard",
        edits=(
            (
                "    total = weights * (shard if zero_stage >= 3 else count)\n",
                "    total = weights * (shard if zero_stage >= 3 else count)\n    if zero_stage >= 3:\n        total -= total % 8\n",
            ),
        ),
    ),
    Wrong(
        name="half_byte_float_product",
        belief="0.5 is exact, so its product is.",
        caught_by="test_nought_is_a_count_and_half_bytes_are_exact",
        says="floats round",
        edits=(
            (
                "    total = weights * (shard if zero_stage >= 3 else count)\n",
                "    part = shard if zero_stage >= 3 else count\n    total = weights * part if weights > 4 else -(-part * 0.5 // 1) * 8\n",
            ),
            ("    return -(-total // 8)", "    return int(-(-total // 8))"),
        ),
    ),
    Wrong(
        name="lora_returns_float",
        belief="501.0 bytes are 501 bytes.",
        caught_by="test_nought_is_a_count_and_half_bytes_are_exact",
        says="bytes of",
        edits=(
            (
                "    total = _bytes_on_one_rank(n_params, _BITS[recipe], zero_stage, ranks)\n",
                "    total = _bytes_on_one_rank(n_params, _BITS[recipe], zero_stage, ranks)\n    if trainable is not None:\n        total = float(total)\n",
            ),
        ),
    ),
]
