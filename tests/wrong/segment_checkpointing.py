"""Mistakes in segment_checkpointing, each with the spec that must catch it."""

from kit.answers.loading import Wrong

APPLY = """    anchor = torch.empty(0, requires_grad=True)
    return _Checkpoint.apply(anchor, function, *args)  # type: ignore[no-untyped-call]
"""
FIRST_RUN = """        with ctx.autocast.restored(keep_casts=False):
            outputs = function(*args)
        if [tensor"""
SECOND_RUN = """        with torch.enable_grad(), ctx.random.restored(), ctx.autocast.restored():
            outputs = ctx.function(*args)
"""
LEAF = "            args[place] = tensor.detach().requires_grad_(tensor.requires_grad)\n"
BACKWARD = """            torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]
"""
RETURN = (
    "        return None, None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)\n"
)
REFUSAL = """        if torch.is_grad_enabled() or not torch.autograd._is_checkpoint_valid():
            raise"""
SAVE = "        ctx.save_for_backward(*tensors)\n"
RESTORED = """        with torch.random.fork_rng(self.devices):
            self.restore()
            yield
"""
AUTOCAST = "stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=caches))"
SEGMENTS = """    for start, stop in itertools.pairwise(starts):
        x = checkpoint(_Chain(layers[start:stop]), x)
    return _Chain(layers[starts[-1] :])(x)
"""
STARTS = "    return [number * num_layers // segments for number in range(segments)]\n"
BEST = "    return min(range(1, num_layers + 1), key=lambda n: n + -(-num_layers // n))\n"
SWEEP = "        sweep.reverse(0, len(layers), x, _RandomState([x]), snapshots)\n"
SPLIT = "            split = _best_split(stop - start, snapshots) if snapshots > 1 else stop - start - 1\n"
LOSS = """            loss = self.loss_fn(out)
            self.loss, self.random = loss.detach(), _RandomState([out])
            loss.backward()
"""

WRONG = [
    # The article ZOMI's hand-written version, number one: it detaches at the borders of segments.
    Wrong(
        name="detaches_at_the_borders",
        belief="Detached at a border and requiring a gradient again, the segment before is trained.",
        caught_by="test_every_layer_gets_the_plain_gradients_to_the_bit[7-3]",
        says="detaching at a border cuts the graph and nothing joins it again",
        edits=(
            (
                "        x = checkpoint(_Chain(layers[start:stop]), x)\n",
                "        x = _Chain(layers[start:stop])(x).detach().requires_grad_()\n",
            ),
        ),
    ),
    # Part 1
    Wrong(
        name="detaches_the_arguments",
        belief="A detached argument that requires a gradient carries it on.",
        caught_by="test_gives_the_result_and_a_gradient_to_everything",
        says="None for x",
        edits=(
            (
                APPLY,
                "    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args]\n"
                "    return function(*leaves)\n",
            ),
        ),
    ),
    Wrong(
        name="gradients_for_the_arguments_only",
        belief="The Function's inputs are what its backward has to give gradients for.",
        caught_by="test_gives_the_result_and_a_gradient_to_everything",
        says="None for 0.weight",
        edits=(
            (
                BACKWARD,
                "            leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]\n"
                "            outs, given = zip(*pairs, strict=True)\n"
                "            for leaf, grad in zip(leaves, torch.autograd.grad(outs, leaves, given)):\n"
                "                leaf.grad = grad\n",
            ),
        ),
    ),
    Wrong(
        name="runs_under_inference_mode",
        belief="inference_mode is the better no_grad.",
        caught_by="test_gives_the_result_and_a_gradient_to_everything",
        says="does not require grad",
        raises=RuntimeError,
        edits=(
            (
                FIRST_RUN,
                FIRST_RUN.replace("with ctx", "with torch.inference_mode(), ctx"),
            ),
        ),
    ),
    Wrong(
        name="keeps_everything",
        belief="A graph is freed as backward goes, so nothing needs to be run again.",
        caught_by="test_runs_once_forward_and_once_more_backward",
        says="nothing is run again, so everything was kept",
        edits=((APPLY, "    return function(*args)\n"),),
    ),
    Wrong(
        name="tries_the_function_first",
        belief="One run without gradients tells what the outputs look like.",
        caught_by="test_runs_once_forward_and_once_more_backward",
        says="it runs twice at once",
        edits=((APPLY, "    with torch.no_grad():\n        function(*args)\n" + APPLY),),
    ),
    Wrong(
        name="parameters_of_a_module_only",
        belief="What has gradients besides the arguments is function.parameters().",
        caught_by="test_loss_and_gradients_are_the_plain_ones_to_the_bit[a_function_that_uses_a_leaf]",
        says="None for weight",
        edits=(
            (
                BACKWARD,
                "            known = [a for a in args if isinstance(a, Tensor) and a.requires_grad]\n"
                "            known += getattr(ctx.function, 'parameters', list)()\n"
                "            torch.autograd.backward(*zip(*pairs, strict=True), inputs=known)\n",
            ),
        ),
    ),
    Wrong(
        name="one_leaf_for_one_tensor",
        belief="A tensor that is given twice needs one leaf.",
        caught_by="test_loss_and_gradients_are_the_plain_ones_to_the_bit[one_argument_twice]",
        says="a gradient lands with the wrong argument",
        edits=(
            ("        args = list(ctx.args)\n", "        args, leaves = list(ctx.args), {}\n"),
            (
                LEAF,
                "            leaf = tensor.detach().requires_grad_(tensor.requires_grad)\n"
                "            args[place] = leaves.setdefault(tensor.data_ptr(), leaf)\n",
            ),
        ),
    ),
    Wrong(
        name="runs_again_on_the_argument_itself",
        belief="The argument has its graph, so backward goes on through it.",
        caught_by="test_loss_and_gradients_are_the_plain_ones_to_the_bit[a_module]",
        says="gradient of x",
        edits=((LEAF, "            args[place] = tensor\n"),),
    ),
    Wrong(
        name="zeros_for_unused_arguments",
        belief="An argument that is not used has a gradient of zero.",
        caught_by="test_loss_and_gradients_are_the_plain_ones_to_the_bit[an_unused_argument]",
        says="gradient of unused",
        edits=(
            (
                RETURN,
                "        grads_ = [a.grad for a in args if isinstance(a, Tensor)]\n"
                "        grads_ = [torch.zeros_like(a) if g is None else g for a, g in zip(args, grads_)]\n"
                "        return None, None, *grads_\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_the_first_segment_out",
        belief="Function.apply makes a graph whenever gradients are on.",
        caught_by="test_parameters_get_gradients_though_no_argument_needs_one[numbers]",
        says="left out of the graph",
        edits=(("torch.empty(0, requires_grad=True)", "torch.empty(0)"),),
    ),
    Wrong(
        name="asks_for_a_gradient_of_the_input",
        belief="An input that requires a gradient cannot hurt.",
        caught_by="test_parameters_get_gradients_though_no_argument_needs_one[indices]",
        says="only Tensors of floating point dtype can require gradients",
        raises=RuntimeError,
        edits=(
            (
                "anchor = torch.empty(0, requires_grad=True)",
                "anchor = args[0].requires_grad_()",
            ),
        ),
    ),
    Wrong(
        name="sets_the_gradients",
        belief="The second run's gradients are the gradients.",
        caught_by="test_adds_to_the_gradients_that_are_there",
        says="gradients are set, not added",
        edits=(
            (
                "            # backward, not grad: the parameters inside accumulate theirs.\n",
                "            for p in getattr(ctx.function, 'parameters', list)():\n"
                "                p.grad = None\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_outputs_too",
        belief="The outputs are needed to hang the gradients on.",
        caught_by="test_keeps_its_arguments_and_nothing_else",
        says="the outputs are kept with the arguments",
        edits=((SAVE, "        ctx.save_for_backward(*tensors)\n        ctx.outputs = outputs\n"),),
    ),
    Wrong(
        name="keeps_the_graph_of_the_first_run",
        belief="Running again is what saves memory.",
        caught_by="test_the_peak_is_one_block_and_an_input_for_each_of_the_others",
        says="it must run without gradients",
        edits=(
            (
                FIRST_RUN,
                "        with torch.enable_grad(), ctx.autocast.restored():\n"
                "            ctx.graph = function(*args)\n"
                "            outputs = ctx.graph.detach()\n"
                "        if [tensor",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_arguments_on_the_node",
        belief="ctx is as good a place as save_for_backward, if the versions are compared.",
        caught_by="test_the_backward_pass_frees_what_was_kept",
        says="the arguments hang on the graph's node",
        edits=(
            (SAVE, "        ctx.tensors, ctx.versions = tensors, versions\n"),
            (
                "zip(ctx.places, ctx.saved_tensors, strict=True):\n",
                "zip(ctx.places, ctx.tensors, strict=True):\n"
                "            if tensor._version not in ctx.versions:\n"
                "                raise RuntimeError('an argument was changed in place')\n",
            ),
        ),
    ),
    Wrong(
        name="always_a_function",
        belief="Under no_grad a Function does no harm.",
        caught_by="test_without_gradients_it_is_the_plain_call[inference_mode]",
        says="Inference tensors do not track version counter",
        raises=RuntimeError,
        edits=(("    if not torch.is_grad_enabled():\n        return function(*args)\n", ""),),
    ),
    Wrong(
        name="a_graph_under_no_grad",
        belief="A checkpoint always needs gradients.",
        caught_by="test_without_gradients_it_is_the_plain_call[no_grad]",
        says="torch.no_grad() is not asked for",
        edits=(
            ("    if not torch.is_grad_enabled():\n        return function(*args)\n", ""),
            (
                "    return _Checkpoint.apply(anchor, function, *args)",
                "    with torch.enable_grad():\n"
                "        return _Checkpoint.apply(anchor, function, *args)",
            ),
        ),
    ),
    Wrong(
        name="a_function_always_has_a_graph",
        belief="What is checkpointed is trained.",
        caught_by="test_a_function_without_gradients_stops_nothing[all_frozen]",
        says="does not require grad",
        edits=(
            (
                "isinstance(output, Tensor) and output.requires_grad and",
                "isinstance(output, Tensor) and",
            ),
        ),
    ),
    Wrong(
        name="lets_autograd_grad_through",
        belief="autograd.grad is backward without .grad.",
        caught_by="test_refuses_what_would_lose_gradients[grad_of_the_argument]",
        says="gradients in 0.weight",
        edits=((REFUSAL, "        if torch.is_grad_enabled():\n            raise"),),
    ),
    Wrong(
        name="lets_inputs_through",
        belief="backward() is backward().",
        caught_by="test_refuses_what_would_lose_gradients[inputs=]",
        says="gradients in 0.weight",
        edits=((REFUSAL, "        if torch.is_grad_enabled():\n            raise"),),
    ),
    Wrong(
        name="once_differentiable_refuses",
        belief="once_differentiable raises for every second derivative.",
        caught_by="test_refuses_a_second_derivative",
        says="create_graph=True goes unnoticed",
        edits=(
            (REFUSAL, "        if not torch.autograd._is_checkpoint_valid():\n            raise"),
            (
                "    @staticmethod\n    def backward(",
                "    @staticmethod\n    @torch.autograd.function.once_differentiable\n    def backward(",
            ),
        ),
    ),
    Wrong(
        name="wraps_errors",
        belief="An error should say that it comes from a checkpoint.",
        caught_by="test_an_error_in_the_function_reaches_the_caller",
        says="errors are caught on their way",
        edits=(
            (
                FIRST_RUN,
                "        try:\n"
                "            with ctx.autocast.restored(keep_casts=False):\n"
                "                outputs = function(*args)\n"
                "        except Exception as error:\n"
                "            raise RuntimeError('in a checkpointed function') from error\n"
                "        if [tensor",
            ),
        ),
    ),
    Wrong(
        name="switches_gradients_by_hand",
        belief="set_grad_enabled(False) before and True after is no_grad.",
        caught_by="test_an_error_in_the_function_reaches_the_caller",
        says="gradients enabled after the error",
        edits=(
            (
                APPLY,
                "    torch.set_grad_enabled(False)\n    function(*args)\n"
                "    torch.set_grad_enabled(True)\n" + APPLY,
            ),
        ),
    ),
    # Part 2
    Wrong(
        name="tensors_only",
        belief="Arguments are tensors.",
        caught_by="test_arguments_and_outputs_may_be_anything",
        says="save_for_backward can only save variables",
        raises=TypeError,
        edits=((SAVE, "        ctx.save_for_backward(*args)\n"),),
    ),
    Wrong(
        name="outputs_become_tensors",
        belief="Outputs of a Function are tensors.",
        caught_by="test_arguments_and_outputs_may_be_anything",
        says="only tensors come through",
        edits=(
            (
                SAVE + "        return outputs\n",
                SAVE + "        if isinstance(outputs, tuple):\n"
                "            outputs = tuple(torch.tensor(o) if isinstance(o, int) else o for o in outputs)\n"
                "        return outputs\n",
            ),
        ),
    ),
    Wrong(
        name="draws_anew",
        belief="Dropout is random anyway.",
        caught_by="test_dropout_drops_the_same_again[at_once]",
        says="draws other random numbers",
        edits=((SECOND_RUN, SECOND_RUN.replace(" ctx.random.restored(),", "")),),
    ),
    Wrong(
        name="seeds_again",
        belief="The seed makes random numbers repeatable.",
        caught_by="test_dropout_drops_the_same_again[other_draws_in_between]",
        says="draws other random numbers",
        edits=(
            (
                "        torch.set_rng_state(self.cpu)\n",
                "        torch.manual_seed(torch.initial_seed())\n",
            ),
        ),
    ),
    Wrong(
        name="one_state_for_a_module",
        belief="A module has one random state.",
        caught_by="test_dropout_drops_the_same_again[at_once]",
        says="draws other random numbers",
        edits=(
            (
                "        ctx.random, ctx.autocast = _RandomState(tensors), _AutocastState()\n",
                "        ctx.random, ctx.autocast = _RandomState(tensors), _AutocastState()\n"
                "        function._random = ctx.random\n",
            ),
            (
                "torch.enable_grad(), ctx.random.restored()",
                "torch.enable_grad(), ctx.function._random.restored()",
            ),
        ),
    ),
    Wrong(
        name="leaves_the_old_random_state",
        belief="Restored is restored.",
        caught_by="test_the_random_stream_goes_on_as_if_nothing_ran_twice",
        says="stays in force after the second run",
        edits=((RESTORED, "        self.restore()\n        yield\n"),),
    ),
    Wrong(
        name="takes_back_the_first_runs_draws",
        belief="Both runs need the same state, so the first is run from a saved one too.",
        caught_by="test_the_random_stream_goes_on_as_if_nothing_ran_twice",
        says="the first run's draws are taken back",
        edits=((FIRST_RUN, FIRST_RUN.replace("with ctx", "with ctx.random.restored(), ctx")),),
    ),
    Wrong(
        name="forgets_the_gpu",
        belief="The random state is torch.get_rng_state().",
        caught_by="test_random_numbers_of_the_gpu_are_the_same_too",
        says="cuda generator",
        edits=(
            (
                "        self.devices = sorted({t.get_device() for t in tensors if t.is_cuda})\n",
                "        self.devices = []\n",
            ),
        ),
    ),
    Wrong(
        name="runs_again_without_autocast",
        belief="backward is outside autocast, and rightly.",
        caught_by="test_runs_again_in_the_dtype_of_the_first_run[bf16]",
        says="dtypes of the two runs",
        edits=((SECOND_RUN, SECOND_RUN.replace(", ctx.autocast.restored()", "")),),
    ),
    Wrong(
        name="autocast_without_its_dtype",
        belief="autocast knows its dtype (as in fairscale#1199).",
        caught_by="test_runs_again_in_the_dtype_of_the_first_run[fp16]",
        says="dtypes of the two runs",
        edits=((AUTOCAST, "stack.enter_context(torch.autocast(device, enabled=enabled))"),),
    ),
    Wrong(
        name="casts_at_each_use",
        belief="Without autocast's cache nothing can go wrong.",
        caught_by="test_a_weight_that_is_used_twice_under_autocast_adds_up_in_its_dtype[cached]",
        says="casts a weight at each use",
        edits=(("self.caches and keep_casts", "False"),),
    ),
    Wrong(
        name="casts_once_always",
        belief="Autocast's cache is always on.",
        caught_by="test_a_weight_that_is_used_twice_under_autocast_adds_up_in_its_dtype[not_cached]",
        says="cache was off in the first run",
        edits=(("self.caches and keep_casts", "keep_casts"),),
    ),
    Wrong(
        name="switches_autocast_on_only",
        belief="Where autocast was off there is nothing to restore.",
        caught_by="test_runs_again_without_autocast_where_it_was_off",
        says="the second run has the autocast of the backward pass",
        edits=(
            (
                "                " + AUTOCAST,
                "                if enabled:\n                    " + AUTOCAST,
            ),
        ),
    ),
    Wrong(
        name="runs_a_copy_of_the_module",
        belief="A copy keeps the second run apart from everything else.",
        caught_by="test_a_weight_that_autocast_has_cast_before_gets_its_gradient",
        says="error of the gradient of weight",
        edits=(
            ("import itertools\n", "import copy\nimport itertools\n"),
            (
                "            outputs = ctx.function(*args)\n",
                "            twin = copy.deepcopy(ctx.function)\n"
                "            twin.zero_grad()\n"
                "            outputs = twin(*args)\n",
            ),
            (
                BACKWARD,
                BACKWARD
                + "            for p, q in zip(ctx.function.parameters(), twin.parameters(), strict=True):\n"
                "                p.grad = q.grad\n",
            ),
        ),
    ),
    Wrong(
        name="zeros_for_unused_outputs",
        belief="An output that is not used has a gradient of zero.",
        caught_by="test_an_output_that_is_not_used_gets_no_gradient[first_used]",
        says="zeros stand in for the gradient",
        edits=(
            ("        ctx.set_materialize_grads(False)", "        ctx.set_materialize_grads(True)"),
        ),
    ),
    Wrong(
        name="pairs_gradients_by_order",
        belief="There are as many gradients as outputs that require one.",
        caught_by="test_an_output_that_is_not_used_gets_no_gradient[last_used]",
        says="handed to the outputs in order",
        edits=(
            (
                "for output, grad in zip(outputs, grads, strict=True)\n",
                "for output, grad in zip(outputs, [g for g in grads if g is not None])\n",
            ),
        ),
    ),
    Wrong(
        name="unpacks_a_tuple_of_one",
        belief="A tuple of one is its item.",
        caught_by="test_outputs_may_be_views_arguments_and_tuples[a_tuple]",
        says="a tuple is not kept a tuple",
        edits=(
            (
                SAVE + "        return outputs\n",
                SAVE + "        if isinstance(outputs, tuple) and len(outputs) == 1:\n"
                "            return outputs[0]\n"
                "        return outputs\n",
            ),
        ),
    ),
    Wrong(
        name="detaches_outputs_that_are_views",
        belief="A view cannot leave a Function (it could not once).",
        caught_by="test_outputs_may_be_views_arguments_and_tuples[a_view_changed_in_place]",
        says="None for x",
        edits=(
            (
                "        outputs = _detached(outputs)\n",
                "        views = isinstance(outputs, Tensor) and outputs._is_view()\n"
                "        outputs = _detached(outputs)\n"
                "        if views:\n            ctx.mark_non_differentiable(outputs)\n",
            ),
        ),
    ),
    Wrong(
        name="one_state_for_all_checkpoints",
        belief="The state of the last forward pass is the one that backward needs first.",
        caught_by="test_a_checkpoint_may_stand_inside_another",
        says="overwritten by another",
        edits=(
            (
                "        ctx.random, ctx.autocast = _RandomState(tensors), _AutocastState()\n",
                "        _Checkpoint.random, ctx.autocast = _RandomState(tensors), _AutocastState()\n",
            ),
            (
                "torch.enable_grad(), ctx.random.restored()",
                "torch.enable_grad(), _Checkpoint.random.restored()",
            ),
        ),
    ),
    Wrong(
        name="uses_up_the_random_state",
        belief="A backward pass comes once.",
        caught_by="test_backward_may_be_called_again_where_the_graph_is_retained",
        says="uses up what the second one needs",
        edits=((SECOND_RUN, SECOND_RUN + "        ctx.random = _RandomState([])\n"),),
    ),
    Wrong(
        name="frees_the_function",
        belief="After backward nothing is needed.",
        caught_by="test_backward_may_be_called_again_where_the_graph_is_retained",
        says="object is not callable",
        raises=TypeError,
        edits=((SECOND_RUN, SECOND_RUN + "        ctx.function = None\n"),),
    ),
    Wrong(
        name="plain_inside_another",
        belief="Inside a checkpoint nothing is left to save.",
        caught_by="test_nested_checkpoints_save_at_both_levels",
        says="the inner checkpoints do nothing",
        edits=(
            (
                "    if not torch.is_grad_enabled():\n        return function(*args)\n",
                "    if not torch.is_grad_enabled() or _Checkpoint.running:\n        return function(*args)\n",
            ),
            (
                "class _Checkpoint(torch.autograd.Function):\n",
                "class _Checkpoint(torch.autograd.Function):\n    running = False\n\n",
            ),
            (
                SECOND_RUN,
                "        _Checkpoint.running = True\n"
                + SECOND_RUN
                + "        _Checkpoint.running = False\n",
            ),
        ),
    ),
    Wrong(
        name="arguments_on_ctx",
        belief="ctx.args = args keeps the arguments.",
        caught_by="test_refuses_an_argument_that_was_changed_since[input]",
        says="only save_for_backward looks for changes in place",
        edits=(
            (SAVE, "        ctx.tensors = tensors\n"),
            (
                "zip(ctx.places, ctx.saved_tensors, strict=True)",
                "zip(ctx.places, ctx.tensors, strict=True)",
            ),
        ),
    ),
    Wrong(
        name="saves_what_needs_a_gradient",
        belief="What needs no gradient needs no protection.",
        caught_by="test_refuses_an_argument_that_was_changed_since[mask_without_gradient]",
        says="only save_for_backward looks for changes in place",
        edits=(
            (
                SAVE,
                "        ctx.tensors = [None if t.requires_grad else t for t in tensors]\n"
                "        ctx.save_for_backward(*(t for t in tensors if t.requires_grad))\n",
            ),
            (
                "        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):\n",
                "        saved = iter(ctx.saved_tensors)\n"
                "        for place, tensor in zip(ctx.places, ctx.tensors, strict=True):\n"
                "            tensor = next(saved) if tensor is None else tensor\n",
            ),
        ),
    ),
    Wrong(
        name="lets_the_function_change_its_argument",
        belief="save_for_backward notices every change in place.",
        caught_by="test_refuses_a_function_that_changes_its_argument[input]",
        says="compared before and after",
        edits=(
            ("    if [tensor._version for tensor in tensors] != versions:\n", "    if False:\n"),
        ),
    ),
    Wrong(
        name="looks_at_what_needs_a_gradient",
        belief="A mask may be changed.",
        caught_by="test_refuses_a_function_that_changes_its_argument[mask_without_gradient]",
        says="compared before and after",
        edits=(
            (
                "        if [tensor._version for tensor in tensors] != versions:\n",
                "        if any(t._version != v for t, v in zip(tensors, versions) if t.requires_grad):\n",
            ),
        ),
    ),
    Wrong(
        name="refuses_every_change_in_place",
        belief="In-place operations and checkpoints do not go together.",
        caught_by="test_a_function_may_change_its_own_tensors_in_place",
        says="the checkpointed function changes an argument in place",
        raises=RuntimeError,
        edits=(
            (
                "        if [tensor._version for tensor in tensors] != versions:\n",
                "        if [tensor._version for tensor in tensors] != versions or outputs._version:\n",
            ),
        ),
    ),
    Wrong(
        name="puts_random_state_back_without_finally",
        belief="What is set before is put back after.",
        caught_by="test_an_error_in_the_second_run_leaves_the_random_state_as_it_was",
        says="not put back when it fails",
        edits=(
            (
                RESTORED,
                "        now = _RandomState([torch.empty(0, device=f'cuda:{d}') for d in self.devices])\n"
                "        self.restore()\n"
                "        yield\n"
                "        now.restore()\n",
            ),
        ),
    ),
    Wrong(
        name="a_gradient_for_every_tensor",
        belief="Every leaf of the second run requires a gradient.",
        caught_by="test_integers_and_tensors_without_gradient_get_none",
        says="a gradient is asked for a tensor that cannot have one",
        edits=((LEAF, "            args[place] = tensor.detach().requires_grad_()\n"),),
    ),
    Wrong(
        name="a_gradient_for_every_float",
        belief="Only integers cannot have a gradient.",
        caught_by="test_integers_and_tensors_without_gradient_get_none",
        says="require other gradients than the arguments",
        edits=(
            (
                LEAF,
                "            args[place] = tensor.detach().requires_grad_(tensor.is_floating_point())\n",
            ),
        ),
    ),
    Wrong(
        name="hands_over_to_torch",
        belief="torch.utils.checkpoint does all this (its reentrant form is next).",
        caught_by="test_refuses_a_function_that_changes_its_argument[input]",
        says="compared before and after",
        edits=(
            ("import torch\n", "import torch\nimport torch.utils.checkpoint as torchs\n"),
            (APPLY, "    return torchs.checkpoint(function, *args, use_reentrant=False)\n"),
        ),
    ),
    Wrong(
        name="hands_over_to_torchs_reentrant_form",
        belief="torch.utils.checkpoint does all this.",
        caught_by="test_an_output_that_is_not_used_gets_no_gradient[first_used]",
        says="zeros stand in for the gradient",
        edits=(
            ("import torch\n", "import torch\nimport torch.utils.checkpoint as torchs\n"),
            (APPLY, "    return torchs.checkpoint(function, *args, use_reentrant=True)\n"),
        ),
    ),
    Wrong(
        name="none_marks_the_tensors",
        belief="None stands where a tensor was taken out.",
        caught_by="test_arguments_and_outputs_may_be_anything",
        says="",
        raises=StopIteration,
        edits=(
            (
                "        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):\n",
                "        saved = iter(ctx.saved_tensors)\n"
                "        for place in [place for place, arg in enumerate(args) if arg is None]:\n"
                "            tensor = next(saved)\n",
            ),
        ),
    ),
    Wrong(
        name="copies_what_is_no_tensor",
        belief="A copy is safe from changes.",
        caught_by="test_arguments_and_outputs_may_be_anything",
        says="the second run gets another object",
        edits=(
            ("import itertools\n", "import copy\nimport itertools\n"),
            ("        args = list(ctx.args)\n", "        args = copy.deepcopy(ctx.args)\n"),
        ),
    ),
    Wrong(
        name="runs_backward_under_the_old_autocast",
        belief="The second run and its backward pass belong together.",
        caught_by="test_the_backward_pass_itself_is_outside_the_autocast_of_the_first_run",
        says="backward() runs where autocast is restored",
        edits=(
            (
                BACKWARD,
                BACKWARD.replace(
                    "            torch",
                    "            with ctx.autocast.restored():\n                torch",
                    1,
                ),
            ),
        ),
    ),
    Wrong(
        name="returns_parameters_as_they_are",
        belief="What the function returns is what a Function may return.",
        caught_by="test_an_output_may_be_a_parameter_or_a_buffer",
        says="becomes part of the graph",
        edits=(("        outputs = _detached(outputs)\n", ""),),
    ),
    Wrong(
        name="indices_on_ctx",
        belief="save_for_backward is for tensors of floating point.",
        caught_by="test_refuses_an_argument_that_was_changed_since[indices]",
        says="only save_for_backward looks for changes in place",
        edits=(
            (
                SAVE,
                "        ctx.tensors = [None if t.is_floating_point() else t for t in tensors]\n"
                "        ctx.save_for_backward(*(t for t in tensors if t.is_floating_point()))\n",
            ),
            (
                "        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):\n",
                "        saved = iter(ctx.saved_tensors)\n"
                "        for place, tensor in zip(ctx.places, ctx.tensors, strict=True):\n"
                "            tensor = next(saved) if tensor is None else tensor\n",
            ),
        ),
    ),
    Wrong(
        name="looks_at_floating_point_only",
        belief="Indices are not changed.",
        caught_by="test_refuses_a_function_that_changes_its_argument[indices]",
        says="compared before and after",
        edits=(
            (
                "        tensors = [arg for arg in args if isinstance(arg, Tensor)]\n        versions",
                "        tensors = [arg for arg in args if isinstance(arg, Tensor)]\n"
                "        floats = [tensor for tensor in tensors if tensor.is_floating_point()]\n        versions",
            ),
            (
                "versions = [tensor._version for tensor in tensors]",
                "versions = [tensor._version for tensor in floats]",
            ),
            (
                "if [tensor._version for tensor in tensors] !=",
                "if [tensor._version for tensor in floats] !=",
            ),
        ),
    ),
    Wrong(
        name="holds_the_second_run_in_a_cycle",
        belief="What nobody refers to from outside is freed at once.",
        caught_by="test_the_peak_is_one_block_and_an_input_for_each_of_the_others",
        says="or the second run's in a cycle",
        edits=(
            (
                LEAF,
                LEAF + "        ctx.again = {'args': args, 'ctx': ctx}\n",
            ),
        ),
    ),
    Wrong(
        name="hands_it_all_to_torch",
        belief="torch.utils.checkpoint does all this.",
        caught_by="test_is_not_torchs_own",
        says="of that module runs",
        edits=(
            ("import torch\n", "import torch\nimport torch.utils.checkpoint as torchs\n"),
            (APPLY, "    return torchs.checkpoint(function, *args, use_reentrant=False)\n"),
        ),
    ),
    # Part 3
    Wrong(
        name="drops_the_rest",
        belief="Segments are len(layers) // segments long.",
        caught_by="test_every_layer_gets_the_plain_gradients_to_the_bit[7-3]",
        says="layers are left out or run twice",
        edits=(
            (
                "    starts = _starts(len(layers), segments)\n",
                "    starts = _starts(len(layers), segments)\n"
                "    layers = layers[: len(layers) // segments * segments]\n"
                "    starts = _starts(len(layers), segments)\n",
            ),
        ),
    ),
    Wrong(
        name="the_root_as_it_is",
        belief="The best number of segments is the square root.",
        caught_by="test_best_segments_has_the_lowest_peak",
        says="type of best_segments(1)",
        edits=((BEST, "    return num_layers**0.5\n"),),
    ),
    Wrong(
        name="the_root_of_twice_as_many",
        belief="The best number of segments is sqrt(2 n).",
        caught_by="test_best_segments_has_the_lowest_peak",
        says="a number of segments whose peak is",
        edits=((BEST, "    return math.isqrt(2 * num_layers)\n"),),
    ),
    Wrong(
        name="checkpoints_the_last_segment_too",
        belief="All segments are alike.",
        caught_by="test_each_layer_runs_twice_but_those_of_the_last_segment[7-3]",
        says="the last segment is checkpointed too",
        edits=(
            (
                "    return _Chain(layers[starts[-1] :])(x)\n",
                "    return checkpoint(_Chain(layers[starts[-1] :]), x)\n",
            ),
        ),
    ),
    Wrong(
        name="the_rest_goes_to_the_last_segment",
        belief="The last segment takes what is left (as checkpoint_sequential does).",
        caught_by="test_each_layer_runs_twice_but_those_of_the_last_segment[14-9]",
        says="the rest of the division goes to one segment",
        edits=(
            (
                STARTS,
                "    return [number * (num_layers // segments) for number in range(segments)]\n",
            ),
        ),
    ),
    Wrong(
        name="segments_of_size_segments",
        belief="segments is the number of layers in each.",
        caught_by="test_each_layer_runs_twice_but_those_of_the_last_segment[14-9]",
        says="segments that ran again",
        edits=((STARTS, "    return list(range(0, num_layers, segments))\n"),),
    ),
    Wrong(
        name="a_checkpoint_for_each_layer",
        belief="The finer, the better.",
        caught_by="test_each_layer_runs_twice_but_those_of_the_last_segment[7-3]",
        says="segments that ran again",
        edits=((STARTS, "    return list(range(num_layers))\n"),),
    ),
    Wrong(
        name="a_new_leaf_for_the_input",
        belief="The first checkpoint needs an input that requires a gradient.",
        caught_by="test_the_input_need_not_require_a_gradient[from_another_layer]",
        says="cut off what is before",
        edits=(
            (
                "    for start, stop in itertools.pairwise(starts):\n",
                "    x = x.detach().requires_grad_(x.is_floating_point())\n"
                "    for start, stop in itertools.pairwise(starts):\n",
            ),
        ),
    ),
    Wrong(
        name="each_layer_once",
        belief="Layers are a set.",
        caught_by="test_layers_may_be_any_sequence_and_one_may_be_there_twice[tuple]",
        says="not by where they stand",
        edits=(
            (
                "    starts = _starts(len(layers), segments)\n",
                "    layers = list(dict.fromkeys(layers))\n    starts = _starts(len(layers), segments)\n",
            ),
        ),
    ),
    Wrong(
        name="trains_always",
        belief="Segments are for training.",
        caught_by="test_without_gradients_each_layer_runs_once",
        says="no_grad() is not heeded",
        edits=(
            (
                SEGMENTS,
                "    with torch.enable_grad():\n"
                + "".join(f"    {line}\n" for line in SEGMENTS.splitlines()),
            ),
        ),
    ),
    Wrong(
        name="the_largest_segment_last",
        belief="The rest may go anywhere.",
        caught_by="test_the_peak_is_the_inputs_and_the_largest_segment[14-3]",
        says="a segment is larger than it need be",
        edits=(
            (
                STARTS,
                "    return [number * (num_layers // segments) for number in range(segments)]\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_graph_of_each_segment",
        belief="Running again is what saves memory.",
        caught_by="test_the_peak_is_the_inputs_and_the_largest_segment[16-4]",
        says="a segment is larger than it need be, more than one input",
        edits=(
            (
                FIRST_RUN,
                "        with torch.enable_grad(), ctx.autocast.restored():\n"
                "            ctx.graph = function(*args)\n"
                "            outputs = ctx.graph.detach()\n"
                "        if [tensor",
            ),
        ),
    ),
    Wrong(
        name="half_as_many_segments",
        belief="The last two segments can be one.",
        caught_by="test_is_no_larger_than_torchs_own",
        says="checkpoint_sequential's peak",
        edits=((STARTS, STARTS.replace("range(segments)", "range(max(1, segments - 1))")),),
    ),
    Wrong(
        name="always_four_segments",
        belief="A few segments are enough for any depth.",
        caught_by="test_the_peak_grows_as_the_square_root_of_the_depth",
        says="does not grow with the depth",
        edits=((BEST, "    return min(4, num_layers)\n"),),
    ),
    Wrong(
        name="no_more_segments_than_layers",
        belief="Too many segments are as many as there are layers.",
        caught_by="test_refuses_a_number_of_segments_that_does_not_fit[7-8]",
        says="no error",
        edits=(
            (
                "    if not 1 <= segments <= num_layers:\n",
                "    segments = min(segments, num_layers)\n    if not 1 <= segments:\n",
            ),
        ),
    ),
    Wrong(
        name="no_layers_are_the_identity",
        belief="Nothing to do is no error.",
        caught_by="test_refuses_a_number_of_segments_that_does_not_fit[0-1]",
        says="no error",
        edits=(
            (
                "    starts = _starts(len(layers), segments)\n",
                "    if len(layers) == 0:\n        return x\n    starts = _starts(len(layers), segments)\n",
            ),
        ),
    ),
    Wrong(
        name="checks_when_it_is_too_late",
        belief="The numbers matter where the segments are made.",
        caught_by="test_refuses_a_number_of_segments_that_does_not_fit[7-8]",
        says="checked when layers have run already",
        edits=(
            (
                "    starts = _starts(len(layers), segments)\n",
                "    if segments > len(layers) > 0:\n        _Chain(layers)(x)\n"
                "    starts = _starts(len(layers), segments)\n",
            ),
        ),
    ),
    Wrong(
        name="min_of_nothing_is_the_check",
        belief="min() raises ValueError by itself.",
        caught_by="test_best_segments_refuses_less_than_one_layer[-3]",
        says="does not say which value",
        edits=(
            (
                '    if num_layers < 1:\n        raise ValueError(f"num_layers must',
                '    if False:\n        raise ValueError(f"num_layers must',
            ),
        ),
    ),
    Wrong(
        name="segments_by_torch",
        belief="What part 1 was for is in torch already.",
        caught_by="test_segments_are_not_torchs_own",
        says="of that module runs",
        edits=(
            ("import torch\n", "import torch\nimport torch.utils.checkpoint as torchs\n"),
            (
                "        x = checkpoint(_Chain(layers[start:stop]), x)\n",
                "        x = torchs.checkpoint(_Chain(layers[start:stop]), x, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="marks_the_input",
        belief="An input that requires a gradient does no harm.",
        caught_by="test_the_input_need_not_require_a_gradient[numbers]",
        says="gradient of x (which needs none)",
        edits=(
            (
                "    starts = _starts(len(layers), segments)\n",
                "    if x.is_leaf and x.is_floating_point():\n        x.requires_grad_()\n"
                "    starts = _starts(len(layers), segments)\n",
            ),
        ),
    ),
    # Part 4
    Wrong(
        name="counts_the_forward_with_a_graph",
        belief="Every layer runs forward at least once more.",
        caught_by="test_counts_the_published_steps[10-3]",
        says="the forward with a graph that each layer has is counted too",
        edits=(
            (
                "    return _extra_steps(num_layers, snapshots)\n",
                "    return num_layers + _extra_steps(num_layers, snapshots)\n",
            ),
        ),
    ),
    Wrong(
        name="runs_the_last_layer_first",
        belief="The forward pass is run to its end, as always.",
        caught_by="test_counts_the_published_steps[10-3]",
        says="a layer is counted that need not run besides",
        edits=(
            (
                "    return _extra_steps(num_layers, snapshots)\n",
                "    return 1 + _extra_steps(num_layers, snapshots)\n",
            ),
        ),
    ),
    Wrong(
        name="spreads_snapshots_evenly",
        belief="The best places are at equal distances, and each stretch is then run from its start.",
        caught_by="test_counts_the_published_steps[24-3]",
        says="snapshots are spread evenly",
        edits=(
            (
                "    return _extra_steps(num_layers, snapshots)\n",
                "    places = [i * num_layers // snapshots for i in range(snapshots)] + [num_layers]\n"
                "    sizes = [b - a for a, b in itertools.pairwise(places)]\n"
                "    return places[-2] + sum(n * (n - 1) // 2 for n in sizes)\n",
            ),
        ),
    ),
    Wrong(
        name="the_input_is_free",
        belief="The input is there anyway, so it is no snapshot.",
        caught_by="test_no_sequence_of_actions_is_shorter",
        says="no schedule is so short",
        edits=(
            (
                "    return _extra_steps(num_layers, snapshots)\n",
                "    return _extra_steps(num_layers, snapshots + 1)\n",
            ),
        ),
    ),
    Wrong(
        name="splits_in_the_middle",
        belief="Halving is optimal.",
        caught_by="test_agrees_with_the_closed_form",
        says="the best split is not looked for everywhere",
        edits=(
            (
                "    return _extra_steps(num_layers, snapshots)\n",
                "    if num_layers == 1:\n        return 0\n"
                "    if snapshots == 1:\n        return num_layers * (num_layers - 1) // 2\n"
                "    half = num_layers // 2\n"
                "    behind = fewest_extra_steps(num_layers - half, snapshots - 1)\n"
                "    return half + behind + fewest_extra_steps(half, snapshots)\n",
            ),
        ),
    ),
    Wrong(
        name="drops_anew_in_every_run",
        belief="Dropout is random anyway.",
        caught_by="test_gives_the_plain_loss_and_gradients_to_the_bit[10-3]",
        says="draws other random numbers",
        edits=(
            (
                "        random.restore()\n        self._backward(start, x)\n",
                "        self._backward(start, x)\n",
            ),
        ),
    ),
    Wrong(
        name="restores_only_before_the_graph",
        belief="Runs without a graph need no random state.",
        caught_by="test_gives_the_plain_loss_and_gradients_to_the_bit[10-1]",
        says="draws other random numbers",
        edits=(("            random.restore()\n            # The new", "            # The new"),),
    ),
    Wrong(
        name="returns_the_loss_with_its_graph",
        belief="A scalar is small.",
        caught_by="test_gives_the_plain_loss_and_gradients_to_the_bit[7-6]",
        says="returned with its graph",
        edits=(
            (
                "self.loss, self.random = loss.detach(), _RandomState",
                "self.loss, self.random = loss, _RandomState",
            ),
        ),
    ),
    Wrong(
        name="halves_what_it_runs",
        belief="Any split will do.",
        caught_by="test_runs_as_many_layers_as_it_says_and_the_loss_once[10-2]",
        says="not the one that is counted",
        edits=(
            (
                "    return min(range(1, length), key=lambda split: _cost(length, snapshots, split))\n",
                "    return length // 2\n",
            ),
        ),
    ),
    Wrong(
        name="runs_a_layer_before_its_graph",
        belief="The forward pass is run to its end, as always.",
        caught_by="test_runs_as_many_layers_as_it_says_and_the_loss_once[10-3]",
        says="right before it runs with one",
        edits=(
            (
                SWEEP,
                SWEEP
                + "        with torch.no_grad():\n            layers[-1](torch.zeros_like(x))\n",
            ),
        ),
    ),
    Wrong(
        name="computes_the_loss_twice",
        belief="The loss that is returned is computed without a graph.",
        caught_by="test_runs_as_many_layers_as_it_says_and_the_loss_once[10-3]",
        says="the loss is computed again",
        edits=((LOSS, LOSS.replace("loss.detach()", "self.loss_fn(out.detach())")),),
    ),
    Wrong(
        name="leaves_the_first_layers_random_state",
        belief="Restored is restored.",
        caught_by="test_the_random_stream_goes_on_as_if_each_layer_ran_once[3]",
        says="the state after the last run of some layer stays",
        edits=(("    sweep.random.restore()\n", ""),),
    ),
    Wrong(
        name="forgets_the_draws_of_the_loss",
        belief="Losses draw no random numbers.",
        caught_by="test_the_random_stream_goes_on_as_if_each_layer_ran_once[9]",
        says="or that from before the loss",
        edits=(
            (
                LOSS,
                "            self.random = _RandomState([out])\n"
                "            loss = self.loss_fn(out)\n"
                "            self.loss = loss.detach()\n"
                "            loss.backward()\n",
            ),
        ),
    ),
    Wrong(
        name="sets_the_inputs_gradient",
        belief="x.grad is the gradient of x.",
        caught_by="test_sweeping_adds_to_the_gradients_that_are_there",
        says="gradient of x",
        edits=(
            ("        torch.autograd.backward(x, sweep.grad)\n", "        x.grad = sweep.grad\n"),
        ),
    ),
    Wrong(
        name="one_snapshot_too_many",
        belief="The input is there anyway, so it is no snapshot.",
        caught_by="test_keeps_no_more_inputs_than_it_may[10-4]",
        says="x is not counted",
        edits=((SWEEP, SWEEP.replace("snapshots)", "snapshots + 1)")),),
    ),
    Wrong(
        name="places_snapshots_forever",
        belief="The place of a snapshot comes back with every split.",
        caught_by="test_keeps_no_more_inputs_than_it_may[24-3]",
        says="a snapshot is placed before another is given up",
        edits=(
            (
                "*self._advance(start, start + split, x), snapshots - 1\n",
                "*self._advance(start, start + split, x), max(snapshots - 1, 2)\n",
            ),
        ),
    ),
    Wrong(
        name="never_gives_a_snapshot_up",
        belief="What is kept may be of use again.",
        caught_by="test_the_peak_is_the_snapshots_and_one_layer[24-3]",
        says="snapshots are not given up",
        edits=(
            (
                "        self.layers, self.loss_fn = layers, loss_fn\n",
                "        self.layers, self.loss_fn = layers, loss_fn\n        self.kept: list[Tensor] = []\n",
            ),
            (
                "        return x, _RandomState([x])\n",
                "        self.kept.append(x)\n        return x, _RandomState([x])\n",
            ),
        ),
    ),
    Wrong(
        name="asks_for_the_inputs_gradient",
        belief="A leaf requires a gradient.",
        caught_by="test_the_input_may_be_anything[all_trained-indices]",
        says="only Tensors of floating point dtype can require gradients",
        raises=RuntimeError,
        edits=(
            (
                "requires_grad_(number > 0 or x.requires_grad)",
                "requires_grad_()",
            ),
        ),
    ),
    Wrong(
        name="only_leaves_get_a_gradient",
        belief="x is a leaf.",
        caught_by="test_the_input_may_be_anything[all_trained-from_another_layer]",
        says="does not get to, or past, the first layer",
        edits=(
            (
                "    if x.requires_grad:\n        torch",
                "    if x.requires_grad and x.is_leaf:\n        torch",
            ),
        ),
    ),
    Wrong(
        name="snapshots_need_no_gradient",
        belief="A snapshot has no gradient, so its leaf needs none.",
        caught_by="test_the_input_may_be_anything[all_trained-data]",
        says="grad can be implicitly created",
        raises=RuntimeError,
        edits=(
            ("requires_grad_(number > 0 or x.requires_grad)", "requires_grad_(x.requires_grad)"),
        ),
    ),
    Wrong(
        name="every_layer_is_trained",
        belief="Every layer's output has a graph.",
        caught_by="test_the_input_may_be_anything[two_frozen-data]",
        says="does not require grad",
        raises=RuntimeError,
        edits=(("        elif out.requires_grad:", "        else:"),),
    ),
    Wrong(
        name="finds_layers_by_index",
        belief="A layer knows its place.",
        caught_by="test_a_layer_may_stand_in_two_places",
        says="not by where they stand",
        edits=(
            (
                "            for layer in self.layers[start:stop]:\n                x = layer(x)\n",
                "            for layer in dict.fromkeys(self.layers[start:stop]):\n                x = layer(x)\n",
            ),
        ),
    ),
    Wrong(
        name="sweeps_without_autocast",
        belief="Backward belongs outside autocast.",
        caught_by="test_may_be_called_under_autocast",
        says="some layers run in another dtype",
        edits=(
            (
                "    with _AutocastState().restored(keep_casts=False):\n        sweep",
                "    with torch.autocast(x.device.type, enabled=False):\n        sweep",
            ),
        ),
    ),
    Wrong(
        name="marks_the_first_input",
        belief="An input that requires a gradient does no harm.",
        caught_by="test_the_input_may_be_anything[all_trained-data]",
        says="gradient of data (which needs none)",
        edits=(
            (
                "    sweep = _Sweep(layers, loss_fn)\n",
                "    if x.is_leaf and x.is_floating_point():\n        x.requires_grad_()\n"
                "    sweep = _Sweep(layers, loss_fn)\n",
            ),
        ),
    ),
    Wrong(
        name="gradients_for_the_layers_only",
        belief="What is trained is in the layers.",
        caught_by="test_the_loss_may_have_parameters",
        says="only the layers' own parameters",
        edits=(
            (
                LOSS,
                LOSS.replace(
                    "loss.backward()",
                    "loss.backward(inputs=[leaf, *self.layers[number].parameters()])",
                ),
            ),
        ),
    ),
    Wrong(
        name="keeps_the_last_output",
        belief="One output is small.",
        caught_by="test_the_sweep_leaves_nothing_behind",
        says="kept where it outlives the call",
        edits=((LOSS, LOSS + "            _Sweep.last = out\n"),),
    ),
    Wrong(
        name="no_layers_no_steps",
        belief="No layers need no steps.",
        caught_by="test_fewest_extra_steps_refuses_numbers_below_one[0-3-0]",
        says="no error",
        edits=(
            (
                "    _check_schedule(num_layers, snapshots)\n",
                "    _check_schedule(max(num_layers, 1), snapshots)\n",
            ),
        ),
    ),
    Wrong(
        name="no_snapshots_are_one",
        belief="The input is always there.",
        caught_by="test_refuses_no_layers_and_no_snapshots[5-0-0]",
        says="no error",
        edits=(
            (
                "    _check_schedule(len(layers), snapshots)\n",
                "    _check_schedule(len(layers), 1)\n",
            ),
        ),
    ),
]
