"""Mistakes in fsdp_wrap, each with the spec that must catch it."""

from kit.answers.loading import Wrong

# Parts 1 and 2: wrap.

TAIL_OF_WRAP = """    _check_wrap(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
    # Only now: the parameters of before are not the ones that train.
    return make_optimizer(model.parameters())


def _shard("""
CHECK_WRAP = """    _check_wrap(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
    # Only now"""
POLICY_32 = "    policy, root_policy = MixedPrecisionPolicy(), MixedPrecisionPolicy()\n"
POLICY_16 = "policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)\n"
ROOT_POLICY = (
    "root_policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)\n"
)
LOOP = "    for block in _blocks(model, block_types):\n        if checkpoint:"
UNIT = (
    "        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, "
    "mp_policy=policy)\n"
)
ROOT = "    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)\n"
BLOCKS = "for module in reversed(list(model.modules()))\n"
SHARDED = "    if any(isinstance(x, (FSDPModule, DTensor)) for x in [*model.modules(), *model.parameters()]):\n"
GIVE_BACK = "    model.register_forward_hook(_give_back)\n"
RESHARD = """        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
"""
OWN = "        own = set(_own_parameters(unit, block_types))\n"

WRAP: list[Wrong] = [
    # Part 1
    Wrong(
        name="returns_the_model",
        belief="What wraps a model returns the wrapped model.",
        caught_by="test_every_parameter_becomes_a_shard_and_the_optimizer_holds_it",
        says="the optimizer that make_optimizer has made",
        edits=(
            (
                TAIL_OF_WRAP,
                TAIL_OF_WRAP.replace(
                    "    return make_optimizer(model.parameters())\n",
                    "    make_optimizer(model.parameters())\n    return model\n",
                ),
            ),
        ),
    ),
    Wrong(
        name="optimizer_first",
        belief="A module is sharded in place, so its parameters are still the same objects.",
        caught_by="test_trains_as_one_process_with_the_data_of_all_ranks[2_ranks]",
        says="the optimizer holds the parameters of before",
        edits=(
            (
                TAIL_OF_WRAP,
                TAIL_OF_WRAP.replace(
                    "    _shard(", "    optimizer = make_optimizer(model.parameters())\n    _shard("
                ).replace("return make_optimizer(model.parameters())", "return optimizer"),
            ),
        ),
    ),
    Wrong(
        name="optimizer_of_the_blocks",
        belief="What trains is in the blocks.",
        caught_by="test_trains_as_one_process_with_the_data_of_all_ranks[4_ranks]",
        says="the optimizer does not hold the shards of every parameter",
        edits=(
            (
                TAIL_OF_WRAP,
                TAIL_OF_WRAP.replace(
                    "make_optimizer(model.parameters())",
                    "make_optimizer(\n        p for b in _blocks(model, block_types) for p in b.parameters()\n    )",
                ),
            ),
        ),
    ),
    Wrong(
        name="sums_over_the_ranks",
        belief="Ranks share one batch, so their gradients are added.",
        caught_by="test_trains_as_one_process_with_the_data_of_all_ranks[2_ranks]",
        says="the mean over ranks is taken otherwise",
        edits=(
            (
                ROOT,
                ROOT
                + "    for unit in [*_blocks(model, block_types), model]:\n"
                + "        unit.set_gradient_divide_factor(1.0)\n"
                + "        unit.set_force_sum_reduction_for_comms(True)\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_units_after_backward",
        belief="What is gathered is not gathered again in the next step.",
        caught_by="test_trains_as_one_process_with_the_data_of_all_ranks[2_ranks]",
        says="the second step has seen weights of before the first",
        edits=((ROOT, ROOT + "    model.set_reshard_after_backward(False)\n"),),
    ),
    Wrong(
        name="blocks_in_a_box",
        belief="A unit is a module of its own, around the block.",
        caught_by="test_trains_as_one_process_with_the_data_of_all_ranks[1_ranks]",
        says="modules have new names",
        edits=(
            (
                UNIT,
                UNIT
                + "        name = next(name for name, m in model.named_modules() if m is block)\n"
                + '        parent, _, own = name.rpartition(".")\n'
                + "        setattr(model.get_submodule(parent), own, nn.Sequential(block))\n",
            ),
        ),
    ),
    Wrong(
        name="blocks_only",
        belief="The root's parameters are few, so they can stay whole.",
        caught_by="test_every_gradient_of_other_models_is_that_of_one_process[tied_in_the_root]",
        says="a parameter is in no unit",
        edits=((ROOT, ""),),
    ),
    Wrong(
        name="frozen_parameters_train",
        belief="All parameters of a unit are handled alike.",
        caught_by="test_every_gradient_of_other_models_is_that_of_one_process[frozen]",
        says="gradient on rank 0 of",
        edits=((LOOP, "    model.requires_grad_(True)\n" + LOOP),),
    ),
    Wrong(
        name="wraps_a_block_twice",
        belief="What stands at two places are two blocks.",
        caught_by="test_every_gradient_of_other_models_is_that_of_one_process[a_block_twice]",
        says="fully_shard has already been applied",
        raises=AssertionError,
        edits=(
            (
                LOOP,
                "    blocks = _blocks(model, block_types)\n"
                "    places = [m for _, m in model.named_modules(remove_duplicate=False) if m in blocks]\n"
                + LOOP.replace("_blocks(model, block_types)", "reversed(places)"),
            ),
        ),
    ),
    Wrong(
        name="wraps_the_root_as_a_block_too",
        belief="Whatever is of the class is a block.",
        caught_by="test_every_gradient_of_other_models_is_that_of_one_process[the_root_is_of_the_class]",
        says="fully_shard",
        raises=AssertionError,
        edits=(
            (
                LOOP,
                LOOP.replace(
                    "_blocks(model, block_types)",
                    "[m for m in reversed(list(model.modules())) if isinstance(m, block_types)]",
                ),
            ),
        ),
    ),
    Wrong(
        name="root_only",
        belief="One fully_shard of the model shards all of it.",
        caught_by="test_a_step_gathers_each_block_twice_and_reduces_each_unit_once[8]",
        says="a block is no unit of its own",
        edits=((UNIT, ""),),
    ),
    Wrong(
        name="root_is_given_back_too",
        belief="The same options for every unit.",
        caught_by="test_a_step_gathers_each_block_twice_and_reduces_each_unit_once[64]",
        says="a unit is given back that is needed again",
        edits=((ROOT, ROOT.replace("=False", "=reshard_after_forward")),),
    ),
    Wrong(
        name="last_block_stays",
        belief="Backward begins with the last block, so it need not be given back.",
        caught_by="test_a_step_gathers_each_block_twice_and_reduces_each_unit_once[1024]",
        says="a block is not given back after forward",
        edits=(
            (
                UNIT,
                UNIT.replace(
                    "reshard_after_forward=reshard_after_forward",
                    "reshard_after_forward=reshard_after_forward and block is not _blocks(model, block_types)[0]",
                ),
            ),
        ),
    ),
    Wrong(
        name="every_layer_a_unit",
        belief="The smaller the units, the less is whole at a time.",
        caught_by="test_a_step_gathers_each_block_twice_and_reduces_each_unit_once[8]",
        says="there are too many units",
        edits=(
            (
                LOOP,
                "    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:\n"
                "        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)\n"
                + LOOP,
            ),
        ),
    ),
    Wrong(
        name="outer_blocks_first",
        belief="modules() has the blocks in the right order.",
        caught_by="test_the_units_of_other_models_are_their_blocks[nested]",
        says="Invariant encountered",
        raises=TypeError,
        edits=((BLOCKS, "for module in model.modules()\n"),),
    ),
    Wrong(
        name="children_only",
        belief="Blocks are in one list.",
        caught_by="test_the_units_of_other_models_are_their_blocks[nested]",
        says="a block is no unit of its own",
        edits=(
            (
                BLOCKS,
                "for child in model.children()\n"
                "        for module in (child.children() if isinstance(child, nn.ModuleList) else [child])\n",
            ),
        ),
    ),
    Wrong(
        name="every_second_block",
        belief="Fewer and larger units mean fewer collectives, and that is all there is to it.",
        caught_by="test_four_billion_parameters_fit_a_gpu_of_24_gib",
        says="the units are larger than a block",
        edits=(
            (
                LOOP,
                LOOP.replace("_blocks(model, block_types)", "_blocks(model, block_types)[::2]"),
            ),
        ),
    ),
    Wrong(
        name="the_option_is_forgotten",
        belief="Giving back is what FSDP is for.",
        caught_by="test_blocks_that_stay_are_gathered_once[six_blocks]",
        says="a unit is given back that is needed again",
        edits=((UNIT, UNIT.replace("=reshard_after_forward", "=True")),),
    ),
    Wrong(
        name="the_root_stays_whole",
        belief="Embedding and head are used all the time.",
        caught_by="test_a_rank_holds_its_part_of_weights_gradients_and_state[64-0]",
        says="some parameters are not sharded",
        edits=(
            (
                ROOT,
                "    own = {p for p in model.parameters() if not isinstance(p, DTensor)}\n"
                + ROOT.replace("mesh=mesh,", "mesh=mesh, ignored_params=own,"),
            ),
        ),
    ),
    Wrong(
        name="frozen_parameters_stay_whole",
        belief="A parameter without a gradient needs no reduction, so it needs no shard.",
        caught_by="test_frozen_parameters_are_sharded_too",
        says="a parameter without a gradient stays whole on every rank",
        edits=(
            (LOOP, "    still = {p for p in model.parameters() if not p.requires_grad}\n" + LOOP),
            (UNIT, UNIT.replace("mesh=mesh,", "mesh=mesh, ignored_params=still,")),
            (ROOT, ROOT.replace("mesh=mesh,", "mesh=mesh, ignored_params=still,")),
        ),
    ),
    Wrong(
        name="blocks_are_never_given_back",
        belief="Keeping blocks saves gathers and costs nothing.",
        caught_by="test_no_more_than_two_blocks_and_the_root_are_whole[8]",
        says="blocks are not given back after forward",
        edits=((UNIT, UNIT.replace("=reshard_after_forward", "=False")),),
    ),
    Wrong(
        name="all_blocks_are_one_unit",
        belief="One large collective is better than many small ones.",
        caught_by="test_the_peak_is_the_state_and_a_few_blocks[64]",
        says="more than two blocks are whole at a time",
        edits=(
            (
                UNIT,
                UNIT.replace(
                    "        fully_shard(block", "    fully_shard(_blocks(model, block_types)"
                ),
            ),
        ),
    ),
    Wrong(
        name="keeps_a_half_of_each_block",
        belief="Between all and nothing there is a half, which two ranks can share.",
        caught_by="test_blocks_that_stay_are_not_free",
        says="blocks are given back in spite of",
        edits=((UNIT, UNIT.replace("=reshard_after_forward", "=reshard_after_forward or 2")),),
    ),
    Wrong(
        name="resets_parameters",
        belief="Sharded parameters have to be given their first values.",
        caught_by="test_wrapping_changes_no_value_and_no_flag",
        says="the values, or their digits, get lost",
        edits=(
            (
                LOOP,
                "    for module in model.modules():\n"
                '        if hasattr(module, "reset_parameters"):\n'
                "            module.reset_parameters()\n" + LOOP,
            ),
        ),
    ),
    Wrong(
        name="calls_train",
        belief="A model that is wrapped is going to be trained.",
        caught_by="test_wrapping_changes_no_value_and_no_flag",
        says="train() is called",
        edits=((LOOP, "    model.train()\n" + LOOP),),
    ),
    Wrong(
        name="turns_dropout_on_in_blocks",
        belief="Blocks recompute in train mode.",
        caught_by="test_evaluation_between_the_steps_is_that_of_one_process[given_back]",
        says="has dropout on",
        edits=((UNIT, UNIT + "        block.train()\n"),),
    ),
    Wrong(
        name="takes_all_ranks",
        belief="The mesh is that of the job, which is the default.",
        caught_by="test_only_the_ranks_of_the_mesh_share_the_model[one_rank_of_2]",
        says="another group than the mesh's takes part",
        edits=(
            (UNIT, UNIT.replace("mesh=mesh, ", "")),
            (ROOT, ROOT.replace("mesh=mesh, ", "")),
        ),
    ),
    Wrong(
        name="accepts_a_model_without_blocks",
        belief="Then the whole model is one unit.",
        caught_by="test_refuses_blocks_that_cannot_be_units[an_absent_class]",
        says="no error",
        edits=(("        if not _blocks(model, kind):\n", "        if False:\n"),),
    ),
    Wrong(
        name="accepts_one_absent_class",
        belief="It is enough that there are blocks.",
        caught_by="test_refuses_blocks_that_cannot_be_units[one_absent_class_of_two]",
        says="no error",
        edits=(
            (
                "        if not _blocks(model, kind):\n",
                "        if not _blocks(model, block_types):\n",
            ),
        ),
    ),
    Wrong(
        name="looks_only_at_the_blocks",
        belief="Only blocks can share a parameter.",
        caught_by="test_refuses_blocks_that_cannot_be_units[a_block_that_shares_with_the_root]",
        says="no error",
        edits=(
            (
                "    for unit in [*_blocks(model, block_types), model]:\n" + OWN,
                "    for unit in _blocks(model, block_types):\n" + OWN,
            ),
        ),
    ),
    Wrong(
        name="checks_after_sharding",
        belief="An error is an error, early or late.",
        caught_by="test_refuses_blocks_that_cannot_be_units[one_absent_class_of_two]",
        says="units are made before all of them have been checked",
        edits=(
            (
                CHECK_WRAP,
                "    if any(isinstance(p, DTensor) for p in model.parameters()):\n"
                '        raise ValueError("sharded already")\n'
                "    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)\n"
                "    _check_wrap(model, mesh, block_types, dtype)\n    # Only now",
            ),
        ),
    ),
    Wrong(
        name="accepts_any_mesh",
        belief="fully_shard knows what a mesh means.",
        caught_by="test_refuses_a_mesh_of_two_dimensions[2_by_4]",
        says="no error",
        edits=(("    if mesh.ndim != 1:\n", "    if mesh.ndim > 2:\n"),),
    ),
    Wrong(
        name="looks_at_the_root_for_shards",
        belief="A model is sharded if its root is.",
        caught_by="test_refuses_a_model_that_is_sharded[the_last_block]",
        says="where the last block had been sharded before",
        edits=((SHARDED, "    if isinstance(model, FSDPModule):\n"),),
    ),
    Wrong(
        name="looks_at_the_parameters_for_shards",
        belief="What is sharded has DTensors for parameters.",
        caught_by="test_refuses_a_model_that_is_sharded[all_and_gathered]",
        says="where all and gathered had been sharded before",
        edits=((SHARDED, "    if any(isinstance(p, DTensor) for p in model.parameters()):\n"),),
    ),
    Wrong(
        name="looks_at_the_modules_for_shards",
        belief="Only fully_shard shards.",
        caught_by="test_refuses_a_model_that_is_sharded[one_parameter]",
        says="where one parameter had been sharded before",
        edits=((SHARDED, "    if any(isinstance(m, FSDPModule) for m in model.modules()):\n"),),
    ),
    Wrong(
        name="looks_at_each_module_once",
        belief="A module stands at one place.",
        caught_by="test_refuses_blocks_that_cannot_be_units[a_module_in_two_blocks]",
        says="for a module in two blocks",
        edits=(
            ("    owned = set[nn.Parameter]()\n", "    seen, owned = set(), set()\n"),
            (
                OWN,
                "        modules = [module for module in unit.modules() if module not in seen]\n"
                "        own = {p for module in modules for p in module.parameters(recurse=False)}\n"
                "        seen.update(modules)\n",
            ),
        ),
    ),
    Wrong(
        name="the_root_stays_after_evaluation",
        belief="fully_shard gives back what is to be given back.",
        caught_by="test_evaluation_between_the_steps_is_that_of_one_process[given_back]",
        says="what one has gathered before a step is still there after it",
        edits=((GIVE_BACK, ""),),
    ),
    Wrong(
        name="evaluation_gives_back_the_root_only",
        belief="reshard() of the model is of all units.",
        caught_by="test_a_forward_alone_leaves_nothing_gathered[kept]",
        says="no backward comes that would give it back",
        edits=((RESHARD, "        model.reshard()\n"),),
    ),
    Wrong(
        name="evaluation_gives_back_at_the_end",
        belief="Without activations there is room for the whole model.",
        caught_by="test_a_forward_alone_leaves_nothing_gathered[given_back]",
        says="blocks are given back only where a backward is to come",
        edits=(
            (
                UNIT,
                UNIT
                + "        block.register_forward_pre_hook(\n"
                + "            lambda unit, args: unit.set_reshard_after_forward(\n"
                + "                reshard_after_forward and torch.is_grad_enabled(), recurse=False\n"
                + "            ),\n"
                + "            prepend=True,\n"
                + "        )\n",
            ),
        ),
    ),
    Wrong(
        name="two_blocks_ahead",
        belief="The more is on its way, the less there is to wait for.",
        caught_by="test_no_more_than_one_block_is_gathered_ahead",
        says="three are held at a time",
        edits=(
            (
                ROOT,
                ROOT
                + "    blocks = _blocks(model, block_types)\n"
                + "    for number, block in enumerate(blocks, 1):\n"
                + "        block.set_modules_to_backward_prefetch(blocks[number : number + 2])\n",
            ),
        ),
    ),
    Wrong(
        name="recomputes_unasked",
        belief="Sharded models are large, so blocks are always checkpointed.",
        caught_by="test_no_more_than_one_block_is_gathered_ahead",
        says="which nobody has asked for here",
        edits=(("        if checkpoint:\n", "        if True:\n"),),
    ),
    Wrong(
        name="keeps_the_parameters_of_before",
        belief="A list of parameters is no memory.",
        caught_by="test_nothing_holds_the_whole_parameters_any_more",
        says="something still has the parameters of before",
        edits=((LOOP, "    model.whole = list(model.parameters())\n" + LOOP),),
    ),
    Wrong(
        name="exactly_of_the_class",
        belief="type(module) is the class of a module.",
        caught_by="test_the_units_of_other_models_are_their_blocks[nested]",
        says="a block is no unit of its own",
        edits=(
            (
                "        if isinstance(module, block_types) and module is not model\n",
                "        if type(module) in (block_types if isinstance(block_types, tuple) else [block_types])\n"
                "        and module is not model\n",
            ),
        ),
    ),
    Wrong(
        name="class_by_class",
        belief="The caller names the inner class first.",
        caught_by="test_every_gradient_of_other_models_is_that_of_one_process[nested]",
        says="Invariant encountered",
        raises=TypeError,
        edits=(
            (
                LOOP,
                LOOP.replace(
                    "_blocks(model, block_types)",
                    "[\n"
                    "        block\n"
                    "        for kind in (block_types if isinstance(block_types, tuple) else [block_types])\n"
                    "        for block in _blocks(model, kind)\n"
                    "        if not isinstance(block, FSDPModule)\n"
                    "    ]",
                ),
            ),
        ),
    ),
    # Part 2
    Wrong(
        name="leaves_the_output_in_bfloat16",
        belief="One policy is good for every unit.",
        caught_by="test_units_compute_in_bfloat16_and_the_model_returns_float32[fp32]",
        says="what the model returns is left in bfloat16",
        edits=((ROOT_POLICY, "root_policy = policy\n"),),
    ),
    Wrong(
        name="blocks_return_float32",
        belief="Sums along the residual path need float32.",
        caught_by="test_units_compute_in_bfloat16_and_the_model_returns_float32[fp32]",
        says="a block's output is cast back",
        edits=(
            (
                POLICY_16,
                POLICY_16
                + "        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)\n",
            ),
        ),
    ),
    Wrong(
        name="casts_integers",
        belief="What goes into a bfloat16 model is bfloat16.",
        caught_by="test_units_compute_in_bfloat16_and_the_model_returns_float32[fp64]",
        says="everything is cast, and not only what is floating",
        edits=(
            (
                ROOT,
                ROOT
                + "    if dtype != torch.float32:\n"
                + "        model.register_forward_pre_hook(lambda _, args: tuple(a.to(dtype) for a in args))\n",
            ),
        ),
    ),
    Wrong(
        name="only_the_root_casts",
        belief="What has been cast once stays bfloat16.",
        caught_by="test_units_compute_in_bfloat16_and_the_model_returns_float32[fp32]",
        says="where the root has computed with a buffer",
        edits=((POLICY_16, POLICY_16.replace(")\n", ", cast_forward_inputs=False)\n")),),
    ),
    Wrong(
        name="casts_positional_inputs",
        belief="What is floating comes first.",
        caught_by="test_units_compute_in_bfloat16_and_the_model_returns_float32[fp32]",
        says="only positional inputs are cast",
        edits=(
            (ROOT_POLICY, ROOT_POLICY.replace(")\n", ", cast_forward_inputs=False)\n")),
            (
                ROOT,
                ROOT
                + "    if dtype != torch.float32:\n"
                + "        model.register_forward_pre_hook(\n"
                + "            lambda _, args: tuple(a.to(dtype) if a.is_floating_point() else a for a in args)\n"
                + "        )\n",
            ),
        ),
    ),
    Wrong(
        name="a_root_without_parameters_is_no_unit",
        belief="There is nothing to shard in it.",
        caught_by="test_trains_nearly_as_in_float32[only_blocks]",
        says="what the model returns is left in bfloat16",
        edits=(
            (
                ROOT,
                "    if any(not isinstance(p, DTensor) for p in model.parameters()):\n    " + ROOT,
            ),
        ),
    ),
    Wrong(
        name="buffers_in_bfloat16",
        belief="Buffers are used with parameters, so they have their dtype.",
        caught_by="test_wrapping_in_bfloat16_loses_no_digit",
        says="shards and buffers stay float32",
        edits=(
            (
                LOOP,
                "    for buffer in model.buffers():\n"
                "        if buffer.is_floating_point():\n"
                "            buffer.data = buffer.data.to(dtype)\n" + LOOP,
            ),
        ),
    ),
    Wrong(
        name="gives_back_whatever_is_asked_in_bfloat16",
        belief="Who asks for 16 bits wants the least memory.",
        caught_by="test_blocks_that_stay_are_gathered_once_in_bfloat16_too",
        says="a unit is given back that is needed again",
        edits=(
            (
                UNIT,
                UNIT.replace(
                    "=reshard_after_forward,", "=reshard_after_forward or dtype == torch.bfloat16,"
                ),
            ),
        ),
    ),
    Wrong(
        name="does_not_cast_inputs",
        belief="The caller casts what goes in.",
        caught_by="test_trains_nearly_as_in_float32[odd_sizes]",
        says="dtype",
        raises=RuntimeError,
        edits=((ROOT_POLICY, ROOT_POLICY.replace(")\n", ", cast_forward_inputs=False)\n")),),
    ),
    Wrong(
        name="sums_in_bfloat16",
        belief="bfloat16 has float32's range, so gradients need no division.",
        caught_by="test_trains_nearly_as_in_float32[nested]",
        says="this is another computation",
        edits=(
            (
                ROOT,
                ROOT
                + "    for unit in [*_blocks(model, block_types), model] if dtype != torch.float32 else []:\n"
                + "        unit.set_gradient_divide_factor(1.0)\n"
                + "        unit.set_force_sum_reduction_for_comms(True)\n",
            ),
        ),
    ),
    Wrong(
        name="root_reduces_in_bfloat16",
        belief="A policy without reduce_dtype reduces in float32.",
        caught_by="test_gathers_bfloat16_and_reduces_float32[8]",
        says="or the dtype that they are sent in",
        edits=(
            (ROOT_POLICY, ROOT_POLICY.replace("dtype, torch.float32, output", "dtype, output")),
        ),
    ),
    Wrong(
        name="autocast_for_a_policy",
        belief="Mixed precision is autocast.",
        caught_by="test_whole_blocks_take_half_the_bytes",
        says="parameters are gathered in float32",
        edits=(
            (
                "    if dtype != torch.float32:\n        # Between",
                "    if dtype == torch.float64:\n        # Between",
            ),
            (
                ROOT,
                ROOT
                + "    if dtype != torch.float32:\n"
                + "        model.forward = torch.autocast(mesh.device_type, dtype)(model.forward)\n"
                + "        model.register_forward_hook(lambda _, args, output: output.float())\n",
            ),
        ),
    ),
    Wrong(
        name="blocks_reduce_in_bfloat16",
        belief="Gradients that are computed in bfloat16 have no more to lose.",
        caught_by="test_gradients_of_all_ranks_are_added_in_float32",
        says="gradients are reduced in bfloat16",
        edits=((POLICY_16, POLICY_16.replace("torch.float32", "dtype")),),
    ),
    Wrong(
        name="rounds_the_weights_after_each_step",
        belief="Weights are kept as they are used.",
        caught_by="test_small_updates_add_up",
        says="in which 1 - 0.0001 is 1",
        edits=(
            (
                TAIL_OF_WRAP,
                TAIL_OF_WRAP.replace("return make", "optimizer = make").replace(
                    "\n\n\ndef",
                    "\n\n    def keep(*_: object) -> None:\n"
                    "        for p in model.parameters():\n"
                    "            p.detach().to_local().copy_(p.detach().to_local().to(dtype))\n\n"
                    "    optimizer.register_step_post_hook(keep)\n"
                    "    return optimizer\n\n\ndef",
                ),
            ),
        ),
    ),
    Wrong(
        name="model_in_bfloat16",
        belief="model.bfloat16() is what a policy does.",
        caught_by="test_shards_gradients_and_state_are_float32",
        says="the model is in bfloat16 itself",
        edits=((LOOP, "    model.to(dtype)\n" + LOOP),),
    ),
    Wrong(
        name="norms_in_float32",
        belief="A norm needs float32, as under autocast.",
        caught_by="test_activations_take_half_the_bytes",
        says="something between forward and backward is float32",
        edits=(
            (
                LOOP,
                "    for module in model.modules() if dtype != torch.float32 else []:\n"
                "        if isinstance(module, nn.LayerNorm):\n"
                "            module.forward = lambda x, norm=module: nn.functional.layer_norm(\n"
                "                x.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float()\n"
                "            ).to(dtype)\n" + LOOP,
            ),
        ),
    ),
    Wrong(
        name="rounds_the_weights_once",
        belief="What is gathered in bfloat16 needs no more digits in the shards.",
        caught_by="test_wrapping_in_bfloat16_loses_no_digit",
        says="the values, or their digits, get lost",
        edits=((LOOP, "    model.to(dtype).to(torch.float32)\n" + LOOP),),
    ),
    Wrong(
        name="accepts_float16",
        belief="16 bits are 16 bits.",
        caught_by="test_refuses_another_dtype[fp16]",
        says="no error",
        edits=(
            (
                "    if dtype not in (torch.float32, torch.bfloat16):\n",
                "    if dtype not in (torch.float32, torch.bfloat16, torch.float16):\n",
            ),
        ),
    ),
]

# Parts 3 and 4: train_step, build, and checkpoints.

STEP_HEAD = "    optimizer.zero_grad()\n    shares = []\n"
SYNC = (
    '            model.set_requires_gradient_sync(sync == "each" or number == len(micro_batches))\n'
)
SHARE = "            share = loss_fn(model(inputs), targets) * (len(inputs) / samples)\n"
BACKWARD = (
    "            (share * mesh.size()).backward()\n            shares.append(share.detach())\n"
)
RESYNC = "    finally:\n        model.set_requires_gradient_sync(True)\n"
NORM = (
    "    grad_norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])\n"
)
CLIP = """    if max_norm is not None:
        clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
"""
STEP = "    optimizer.step()\n    loss = torch.stack(shares).sum()\n"
LOSS_OF_ALL = "    dist.all_reduce(loss, group=mesh.get_group())\n"
WHOLE_NORM = "        grad_norm = grad_norm.full_tensor()\n"
RECOMPUTE = (
    "            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)\n"
)
LAST_UNIT = "    # Last: it takes what no block has taken."
SIZES = "    sizes = [len(inputs) for inputs, _ in micro_batches]\n"
MESH = (
    '    mesh = next(p.device_mesh for group in optimizer.param_groups for p in group["params"])\n'
)
GOOD = "    good = bool(sizes) and all(len(inputs) == len(targets) > 0 for inputs, targets in micro_batches)\n"
UNWRAPPED = """    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not wrapped")
"""
ASK = "    samples = _samples_of_all(mesh, micro_batches)\n"

ON_META = '    with torch.device("meta"):\n        model = make_model()\n'
TO_EMPTY = "    model.to_empty(device=mesh.device_type)\n"
SHARD_BUILT = (
    """    _check_wrap(model, mesh, block_types, dtype)
    _shard(model, mesh, block_types, reshard_after_forward, dtype, checkpoint)
"""
    + TO_EMPTY
)
FIRST_ROW = "        first = rows * shard.device_mesh.get_local_rank()\n"
SAVE_CALL = """    dcp.save(  # type: ignore[attr-defined]
        {"model": weights, "optimizer": state}, checkpoint_id=Path(folder) / str(step)
    )
"""
SET_STATE = (
    "    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)\n"
)
POINT = """    if dist.get_rank() == 0:
        (Path(folder) / "latest").write_text(str(step))
"""
BY_NAME = """    done = [path.parent for path in Path(folder).glob("*/.metadata")]
    return max(done, key=lambda path: int(path.name), default=None)
"""
BY_POINTER = """    latest = Path(folder) / "latest"
    return Path(folder) / latest.read_text() if latest.exists() else None
"""
SAME_IN_LOAD = """    _check_same_shapes(
        newest, there, {f"model.{n}": w.shape for n, w in model.state_dict().items()}
    )
"""
SAME_IN_WHOLE = """    there = {name: weight.shape for name, weight in weights.items()}
    _check_same_shapes(path, there, {n: w.shape for n, w in model.state_dict().items()})
"""
WHOLE_WEIGHTS = "    weights = get_model_state_dict(model, options=options)\n"
SET_WHOLE = (
    "    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))\n"
)

STEP_AND_BUILD: list[Wrong] = [
    # Part 3
    Wrong(
        name="the_ranks_mean_is_the_mean",
        belief="FSDP averages over the ranks, so the rest is as with one process.",
        caught_by="test_a_step_is_on_the_mean_over_the_samples_of_all_ranks",
        says="that is not multiplied away",
        edits=((BACKWARD, BACKWARD.replace("(share * mesh.size())", "share")),),
    ),
    Wrong(
        name="every_rank_counts_the_same",
        belief="A rank's loss is the mean over its samples, and the ranks are averaged.",
        caught_by="test_a_step_is_on_the_mean_over_the_samples_of_all_ranks",
        says="every rank counts the same",
        edits=(
            (SHARE, SHARE.replace("/ samples", "/ sum(len(x) for x, _ in micro_batches)")),
            (BACKWARD, BACKWARD.replace("(share * mesh.size())", "share")),
            (LOSS_OF_ALL, LOSS_OF_ALL + "    loss /= mesh.size()\n"),
        ),
    ),
    Wrong(
        name="every_micro_batch_counts_the_same",
        belief="Divide by the number of micro-batches, as every accumulation does.",
        caught_by="test_a_step_is_on_the_mean_over_the_samples_of_all_ranks",
        says="every micro-batch counts the same",
        edits=(
            (SHARE, SHARE.replace("(len(inputs) / samples)", "(1 / len(micro_batches))")),
            (BACKWARD, BACKWARD.replace("(share * mesh.size())", "share")),
            (LOSS_OF_ALL, LOSS_OF_ALL + "    loss /= mesh.size()\n"),
        ),
    ),
    Wrong(
        name="returns_its_own_loss",
        belief="Gradients are reduced, so the loss is that of all.",
        caught_by="test_a_step_is_on_the_mean_over_the_samples_of_all_ranks",
        says="it is this rank's share only",
        edits=((LOSS_OF_ALL, ""),),
    ),
    Wrong(
        name="clears_in_the_loop_of_the_step",
        belief="zero_grad() belongs before every backward().",
        caught_by="test_a_step_is_on_the_mean_over_the_samples_of_all_ranks",
        says="it is of the last micro-batches only",
        edits=((SYNC, "            optimizer.zero_grad()\n" + SYNC),),
    ),
    Wrong(
        name="clears_after_a_step",
        belief="A step ends with zero_grad().",
        caught_by="test_a_step_is_on_the_mean_over_the_samples_of_all_ranks",
        says="gradients are cleared after the step",
        edits=((STEP, STEP.replace("step()\n", "step()\n    optimizer.zero_grad()\n")),),
    ),
    Wrong(
        name="never_syncs_the_last",
        belief='With sync="last" nothing is sent while micro-batches come.',
        caught_by="test_trains_as_one_process_over_three_steps[2_ranks-last]",
        says="never reduced",
        edits=((SYNC, SYNC.replace(" or number == len(micro_batches)", "")),),
    ),
    Wrong(
        name="syncs_the_first",
        belief="One backward pass of a step reduces; which one does not matter.",
        caught_by="test_trains_as_one_process_over_three_steps[2_ranks-last]",
        says="losses of the steps",
        edits=((SYNC, SYNC.replace("number == len(micro_batches)", "number == 1")),),
    ),
    Wrong(
        name="steps_after_each_micro_batch",
        belief="After backward() comes step().",
        caught_by="test_trains_as_one_process_over_three_steps[1_rank-each]",
        says="losses of the steps",
        edits=((BACKWARD, BACKWARD + "            optimizer.step()\n"),),
    ),
    Wrong(
        name="returns_a_dtensor",
        belief="What get_total_norm returns is the norm.",
        caught_by="test_returns_plain_float32_scalars_the_same_on_every_rank[float32]",
        says="a DTensor",
        edits=((WHOLE_NORM, "        pass\n"),),
    ),
    Wrong(
        name="returns_numbers",
        belief="A loss is printed, so item() it is.",
        caught_by="test_returns_plain_float32_scalars_the_same_on_every_rank[float32]",
        says="a number of Python",
        edits=(("StepResult(loss, grad_norm)", "StepResult(loss.item(), grad_norm.item())"),),
    ),
    Wrong(
        name="keeps_the_graph_of_the_loss",
        belief="A scalar is small.",
        caught_by="test_returns_plain_float32_scalars_the_same_on_every_rank[bfloat16]",
        says="keeps its graph",
        edits=((BACKWARD, BACKWARD.replace("share.detach()", "share")),),
    ),
    Wrong(
        name="the_norm_of_its_shards",
        belief="clip_grad_norm_ takes the norm of the gradients that are there.",
        caught_by="test_clips_to_the_norm_of_the_whole_model[does_not_bind]",
        says="not over all shards",
        edits=((NORM, NORM.replace("[p.grad for", "[p.grad.to_local() for")),),
    ),
    Wrong(
        name="the_norm_after_clipping",
        belief="The norm is what the step was made with.",
        caught_by="test_clips_to_the_norm_of_the_whole_model[binds]",
        says="it is the norm after clipping",
        edits=((CLIP, CLIP + NORM),),
    ),
    Wrong(
        name="clips_after_the_step",
        belief="Clipping is for the next step.",
        caught_by="test_clips_to_the_norm_of_the_whole_model[binds]",
        says="before the gradients were clipped",
        edits=((CLIP, ""), (STEP, "    optimizer.step()\n" + CLIP + STEP.split("\n", 1)[1])),
    ),
    Wrong(
        name="scales_to_max_norm",
        belief="Clipping gives the gradients that norm.",
        caught_by="test_clips_to_the_norm_of_the_whole_model[does_not_bind]",
        says="where the norm is above max_norm",
        edits=(
            (
                CLIP,
                "    if max_norm is not None:\n        for p in model.parameters():\n"
                "            p.grad *= max_norm / grad_norm\n",
            ),
        ),
    ),
    Wrong(
        name="clips_each_parameter",
        belief="Each parameter's gradient is clipped by its own norm.",
        caught_by="test_clips_to_the_norm_of_the_whole_model[binds]",
        says="clipping is not by max_norm / norm",
        edits=(
            (
                CLIP,
                "    if max_norm is not None:\n        for p in model.parameters():\n"
                "            clip_grads_with_norm_([p], max_norm, get_total_norm([p.grad]))\n",
            ),
        ),
    ),
    Wrong(
        name="counts_tied_parameters_twice",
        belief="The norm goes over every name of the model.",
        caught_by="test_counts_tied_parameters_once_and_frozen_ones_not_at_all",
        says="norms of the steps",
        edits=(
            (
                NORM,
                "    every = model.named_parameters(remove_duplicate=False)\n"
                "    grad_norm = get_total_norm([p.grad for _, p in every if p.grad is not None])\n",
            ),
        ),
    ),
    Wrong(
        name="accumulates_in_bfloat16",
        belief="With bfloat16 parameters gradients are reduced in float32 by themselves.",
        caught_by="test_both_syncs_accumulate_in_float32_with_bfloat16_parameters",
        says="in bfloat16",
        edits=(
            ("(param_dtype=dtype, reduce_dtype=torch.float32)", "(param_dtype=dtype)"),
            (
                "(dtype, torch.float32, output_dtype=torch.float32)",
                "(dtype, output_dtype=torch.float32)",
            ),
        ),
    ),
    Wrong(
        name="no_checkpoints",
        belief="checkpoint=True is for the caller's model.",
        caught_by="test_checkpointing_leaves_the_gradients_as_they_are",
        says="not at all",
        edits=(("        if checkpoint:\n" + RECOMPUTE, ""),),
    ),
    Wrong(
        name="another_dropout_mask",
        belief="preserve_rng_state=False is faster.",
        caught_by="test_checkpointing_leaves_the_gradients_as_they_are",
        says="another dropout mask",
        edits=((RECOMPUTE, RECOMPUTE.replace("=False)", "=False, preserve_rng_state=False)")),),
    ),
    Wrong(
        name="checkpoints_in_checkpoints",
        belief="A checkpoint more saves more.",
        caught_by="test_checkpointing_leaves_the_gradients_as_they_are",
        says="checkpoints are in each other",
        edits=(
            (
                LAST_UNIT,
                "    if checkpoint:\n"
                "        model.forward = functools.partial(\n"
                "            recompute, model.forward, use_reentrant=False\n"
                "        )\n" + LAST_UNIT,
            ),
        ),
    ),
    Wrong(
        name="clips_every_micro_batch",
        belief="Clipping belongs after every backward().",
        caught_by="test_all_options_at_once_train_as_one_process",
        says="losses of the steps",
        edits=(
            (
                BACKWARD,
                BACKWARD + "            if max_norm is not None and sync == 'each':\n"
                "                nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="reduces_every_micro_batch",
        belief="FSDP knows that only the last gradient is used.",
        caught_by="test_reduces_every_unit_for_each_micro_batch_or_once[last-64]",
        says="micro-batches whose gradients are not wanted yet are reduced",
        edits=((SYNC, ""),),
    ),
    Wrong(
        name="reduces_once_whatever_is_asked",
        belief="Fewer messages are better.",
        caught_by="test_reduces_every_unit_for_each_micro_batch_or_once[each-8]",
        says="a backward pass that should reduce gradients does not",
        edits=((SYNC, SYNC.replace('sync == "each" or ', "")),),
    ),
    Wrong(
        name="gathers_gradients_for_the_norm",
        belief="A norm needs the whole gradient.",
        caught_by="test_reduces_every_unit_for_each_micro_batch_or_once[each-8]",
        says="gradients are sent for the norm",
        edits=((NORM, NORM.replace("[p.grad for", "[p.grad.full_tensor() for")),),
    ),
    Wrong(
        name="checkpoints_the_whole_model",
        belief="One checkpoint around everything keeps the least.",
        caught_by="test_a_checkpointed_block_keeps_its_input_only",
        says="all blocks are recomputed at once",
        edits=(
            ("        if checkpoint:\n" + RECOMPUTE, ""),
            (
                LAST_UNIT,
                "    if checkpoint:\n"
                "        model.forward = functools.partial(\n"
                "            recompute, model.forward, use_reentrant=False\n"
                "        )\n" + LAST_UNIT,
            ),
        ),
    ),
    Wrong(
        name="accumulates_whole_gradients",
        belief="Gradients are added up as they come, and sharded at the end of the step.",
        caught_by="test_holds_shards_of_gradients_or_one_set_of_whole_ones[each-64]",
        says="beyond the backward pass of their unit",
        edits=((SYNC, SYNC.replace('sync == "each" or ', "")),),
    ),
    Wrong(
        name="one_backward_for_the_step",
        belief="Add up the losses, then one backward(): it is the same gradient, and reduces once.",
        caught_by="test_activations_are_those_of_one_micro_batch",
        says="graphs or outputs are kept",
        edits=(
            (SYNC, ""),
            (BACKWARD, "            shares.append(share)\n"),
            (
                RESYNC,
                "        (torch.stack(shares).sum() * mesh.size()).backward()\n"
                "        shares = [share.detach() for share in shares]\n" + RESYNC,
            ),
        ),
    ),
    Wrong(
        name="checkpoints_the_parts_of_a_block",
        belief="The finer the checkpoints, the less is kept.",
        caught_by="test_a_checkpointed_block_keeps_its_input_only",
        says="what is inside the blocks is kept",
        edits=(
            (
                RECOMPUTE,
                "            for part in block.children():\n"
                "                part.forward = functools.partial(\n"
                "                    recompute, part.forward, use_reentrant=False\n"
                "                )\n",
            ),
        ),
    ),
    Wrong(
        name="starts_with_what_is_there",
        belief="Gradients are None before a step.",
        caught_by="test_a_step_starts_without_gradients",
        says="gradients from before the step are in it",
        edits=((STEP_HEAD, "    shares = []\n"),),
    ),
    Wrong(
        name="clips_to_infinity",
        belief="max_norm=None is max_norm=inf.",
        caught_by="test_leaves_gradients_alone_without_max_norm",
        says="max_norm=None clips",
        edits=(
            (
                CLIP,
                "    max_norm = float('inf') if max_norm is None else max_norm\n"
                "    clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_synchronisation_off",
        belief='The next step sets it again, and after sync="last" it is off.',
        caught_by="test_the_next_plain_backward_synchronises[last]",
        says="synchronisation is off",
        edits=((RESYNC, RESYNC.replace("(True)", '(sync == "each")')),),
    ),
    Wrong(
        name="no_finally",
        belief="The last micro-batch has switched synchronisation on.",
        caught_by="test_a_plain_backward_synchronises_after_an_error",
        says="stays off where loss_fn raises",
        edits=((RESYNC, "    finally:\n        pass\n"),),
    ),
    Wrong(
        name="adds_up_the_loss_over_the_job",
        belief="There is one process group.",
        caught_by="test_counts_the_ranks_that_share_the_model[4_ranks]",
        says="not those of the model's mesh",
        edits=((LOSS_OF_ALL, "    dist.all_reduce(loss)\n"),),
    ),
    Wrong(
        name="the_ranks_of_the_job",
        belief="FSDP divides by the world's size.",
        caught_by="test_counts_the_ranks_that_share_the_model[4_ranks]",
        says="not those of the model's mesh",
        edits=((BACKWARD, BACKWARD.replace("mesh.size()", "dist.get_world_size()")),),
    ),
    Wrong(
        name="raises_alone",
        belief="Who has bad input raises.",
        caught_by="test_a_bad_step_on_one_rank_is_refused_by_all[no_micro_batch-1]",
        says="rank 0 waits in a collective call that rank 1 never makes",
        edits=(
            (
                GOOD,
                GOOD + "    if not good:\n"
                '        raise ValueError(f"{len(sizes)} micro-batches with {sizes} samples")\n',
            ),
        ),
    ),
    Wrong(
        name="an_empty_micro_batch_counts_nothing",
        belief="No samples, no share: n_b is 0 (but its mean is nan).",
        caught_by="test_a_bad_step_on_one_rank_is_refused_by_all[an_empty_one-0]",
        says="this input is not checked",
        edits=((GOOD, GOOD.replace(" > 0", "")),),
    ),
    Wrong(
        name="lengths_are_the_losss_business",
        belief="The loss function finds targets that do not fit.",
        caught_by="test_a_bad_step_on_one_rank_is_refused_by_all[more_inputs_than_targets-1]",
        says="the input is not checked",
        edits=((GOOD, "    good = bool(sizes) and all(sizes)\n"),),
    ),
    Wrong(
        name="clears_before_it_asks_the_others",
        belief="Old gradients are of no use, so they may go first.",
        caught_by="test_a_bad_step_on_one_rank_is_refused_by_all[one_too_few-0]",
        says="gradients changed",
        edits=((ASK, "    optimizer.zero_grad()\n" + ASK),),
    ),
    Wrong(
        name="asks_without_grad",
        belief="Only the forward pass needs grad mode.",
        caught_by="test_trains_on_after_a_refused_step",
        says="does not require grad",
        edits=(
            (
                ASK,
                "    enabled = torch.is_grad_enabled()\n    torch.set_grad_enabled(False)\n"
                + ASK
                + "    torch.set_grad_enabled(enabled)\n",
            ),
        ),
        raises=RuntimeError,
    ),
    Wrong(
        name="another_sync_is_last",
        belief='What is not "each" is "last".',
        caught_by="test_refuses_options_that_are_none",
        says="sync='first'",
        edits=(
            (
                """    if sync not in ("each", "last"):
        raise ValueError(f"sync must be 'each' or 'last', not {sync!r}")
""",
                "",
            ),
        ),
    ),
    Wrong(
        name="clips_to_nothing",
        belief="max_norm=0 is a norm.",
        caught_by="test_refuses_options_that_are_none",
        says="max_norm=0.0",
        edits=(
            ("max_norm is not None and not max_norm > 0", "max_norm is not None and max_norm < 0"),
        ),
    ),
    Wrong(
        name="nan_is_no_negative_number",
        belief="Not positive is max_norm <= 0.",
        caught_by="test_refuses_options_that_are_none",
        says="max_norm=nan",
        edits=(
            ("max_norm is not None and not max_norm > 0", "max_norm is not None and max_norm <= 0"),
        ),
    ),
    Wrong(
        name="finds_out_that_it_is_not_wrapped",
        belief="A plain model has no mesh, and that is an error.",
        caught_by="test_refuses_options_that_are_none",
        says="the model is not wrapped",
        edits=((UNWRAPPED, ""),),
    ),
    Wrong(
        name="one_micro_batch_needs_no_reduction",
        belief='With one micro-batch there is nothing that sync="last" could put off.',
        caught_by="test_trains_as_one_process_over_three_steps[4_ranks-last]",
        says="gradients are cleared after the step, or are never reduced",
        edits=((SYNC, SYNC.replace("== len(micro_batches)", "== len(micro_batches) > 1")),),
    ),
    Wrong(
        name="counts_tokens",
        belief="What a loss is the mean of are the numbers in it.",
        caught_by="test_a_sample_counts_once_however_large_it_is",
        says="tokens are counted, and not samples",
        edits=(
            (SHARE, SHARE.replace("len(inputs)", "inputs.numel()")),
            (SIZES, SIZES.replace("len(inputs)", "inputs.numel()")),
        ),
    ),
    Wrong(
        name="inputs_are_floats",
        belief="With float inputs checkpoints work, whatever came.",
        caught_by="test_a_sample_counts_once_however_large_it_is",
        says="Expected tensor for argument",
        edits=((SHARE, SHARE.replace("model(inputs)", "model(inputs.float())")),),
        raises=RuntimeError,
    ),
    Wrong(
        name="an_infinite_norm_is_none",
        belief="inf is no number to clip to.",
        caught_by="test_clips_to_the_norm_of_the_whole_model[is_infinite]",
        says="max_norm must be positive, not inf",
        edits=(("not max_norm > 0", "not 0 < max_norm < float('inf')"),),
        raises=ValueError,
    ),
    Wrong(
        name="a_reentrant_checkpoint",
        belief="Both kinds of checkpoint do the same.",
        caught_by="test_checkpoints_whatever_a_block_takes_and_returns[frozen_beginning]",
        says="a reentrant checkpoint",
        edits=((RECOMPUTE, RECOMPUTE.replace("use_reentrant=False", "use_reentrant=True")),),
    ),
    Wrong(
        name="a_checkpoint_for_one_input",
        belief="A block takes x.",
        caught_by="test_checkpoints_whatever_a_block_takes_and_returns[keywords_and_tuples]",
        says="unexpected keyword argument",
        edits=(
            (
                RECOMPUTE,
                "            def again(x, *, run=block.forward):\n"
                "                return recompute(run, x, use_reentrant=False)\n\n"
                "            block.forward = again\n",
            ),
        ),
        raises=TypeError,
    ),
    Wrong(
        name="the_norm_of_the_first_group",
        belief="The optimizer's parameters are in param_groups[0].",
        caught_by="test_all_options_at_once_train_as_one_process",
        says="one group of the optimizer's parameters only",
        edits=((NORM, NORM.replace("model.parameters()", 'optimizer.param_groups[0]["params"]')),),
    ),
    Wrong(
        name="clips_the_first_group",
        belief="The optimizer's parameters are in param_groups[0].",
        caught_by="test_all_options_at_once_train_as_one_process",
        says="one group of the optimizer's parameters only",
        edits=((CLIP, CLIP.replace("model.parameters()", 'optimizer.param_groups[0]["params"]')),),
    ),
    Wrong(
        name="clears_the_first_group",
        belief="The optimizer's parameters are in param_groups[0].",
        caught_by="test_all_options_at_once_train_as_one_process",
        says="one group of the optimizer's parameters only",
        edits=(
            (
                STEP_HEAD,
                '    for p in optimizer.param_groups[0]["params"]:\n        p.grad = None\n'
                "    shares = []\n",
            ),
        ),
    ),
    Wrong(
        name="stays_gathered_between_micro_batches",
        belief="The next micro-batch needs the same weights: two gathers of each block are one.",
        caught_by="test_two_blocks_and_the_root_are_whole_at_most[last]",
        says="blocks stay gathered for the next micro-batch",
        edits=(
            (
                SYNC,
                SYNC
                + "            model.set_reshard_after_backward(number == len(micro_batches))\n",
            ),
        ),
    ),
    Wrong(
        name="gathers_everything_first",
        belief="Gathering ahead hides the sending.",
        caught_by="test_two_blocks_and_the_root_are_whole_at_most[each]",
        says="blocks stay gathered",
        edits=(
            (
                STEP_HEAD,
                STEP_HEAD + "    for unit in model.modules():\n"
                "        if isinstance(unit, FSDPModule):\n            unit.unshard()\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_last_graph",
        belief="retain_graph=True is for more than one backward() in a step.",
        caught_by="test_activations_are_those_of_one_micro_batch",
        says="graphs or outputs are kept",
        edits=((BACKWARD, BACKWARD.replace("backward()", "backward(retain_graph=True)")),),
    ),
    Wrong(
        name="keeps_the_outputs",
        belief="Outputs are small beside activations.",
        caught_by="test_activations_are_those_of_one_micro_batch",
        says="graphs or outputs are kept",
        edits=(
            (STEP_HEAD, STEP_HEAD + "    outputs = []\n"),
            (
                SHARE,
                "            outputs.append(model(inputs))\n"
                + SHARE.replace("model(inputs)", "outputs[-1]"),
            ),
        ),
    ),
    Wrong(
        name="asks_the_model_for_its_shards",
        belief="The parameters of a wrapped model are DTensors.",
        caught_by="test_a_step_is_right_after_an_error_with_all_gathered",
        says="device_mesh",
        edits=((MESH, "    mesh = next(model.parameters()).device_mesh\n"),),
        raises=AttributeError,
    ),
    Wrong(
        name="looks_at_the_last_micro_batch",
        belief="A data set is irregular at its end.",
        caught_by="test_a_bad_step_on_one_rank_is_refused_by_all[more_targets_than_inputs-0]",
        says="more targets than inputs",
        edits=((GOOD, GOOD.replace(" in micro_batches)", " in micro_batches[-1:])")),),
    ),
    Wrong(
        name="targets_may_be_left_over",
        belief="There has to be a target for every input.",
        caught_by="test_a_bad_step_on_one_rank_is_refused_by_all[more_targets_than_inputs-0]",
        says="more targets than inputs",
        edits=(
            (
                GOOD,
                GOOD.replace("len(inputs) == len(targets) > 0", "0 < len(inputs) <= len(targets)"),
            ),
        ),
    ),
    Wrong(
        name="none_is_a_number_too",
        belief="It is enough that all ranks have as many.",
        caught_by="test_a_step_without_any_micro_batch_is_refused",
        says="where no rank has any",
        edits=((" or counts[0] == 0:", ":"),),
    ),
    # Part 4: build
    Wrong(
        name="init_on_shards",
        belief="init works on DTensors, so nothing has to be whole.",
        caught_by="test_has_the_values_of_one_process[2_ranks-plain]",
        says="init runs in another order, on modules that lack something, or on shards",
        edits=(
            (
                "        _initialise(module, init)\n",
                "        with torch.no_grad():\n            init(module)\n",
            ),
        ),
    ),
    Wrong(
        name="every_rank_takes_the_first_rows",
        belief="Every rank has drawn the same numbers, so every rank has its shard.",
        caught_by="test_has_the_values_of_one_process[4_ranks-blocks_in_blocks]",
        says="or on shards",
        edits=((FIRST_ROW, "        first = 0\n"),),
    ),
    Wrong(
        name="children_first",
        belief="A module is initialised after its children, as apply() does it.",
        caught_by="test_has_the_values_of_one_process[1_rank-blocks_in_blocks]",
        says="init runs in another order",
        edits=(
            (
                "    for module in model.modules():\n        _init",
                "    for module in reversed(list(model.modules())):\n        _init",
            ),
        ),
    ),
    Wrong(
        name="stays_on_meta",
        belief="Sharding makes the shards.",
        caught_by="test_has_the_values_of_one_process[2_ranks-plain]",
        says="to_empty() has not been called",
        edits=((TO_EMPTY, ""),),
    ),
    Wrong(
        name="cuts_ties",
        belief="A shard that is set again needs a new Parameter.",
        caught_by="test_has_the_values_of_one_process[2_ranks-tied_and_frozen]",
        says="has cut the tie",
        edits=(
            (
                "        setattr(module, name, shard)\n",
                "        setattr(module, name, nn.Parameter(shard, shard.requires_grad))\n",
            ),
        ),
    ),
    Wrong(
        name="thaws_what_was_frozen",
        belief="What trains requires gradients.",
        caught_by="test_has_the_values_of_one_process[1_rank-tied_and_frozen]",
        says="requires a gradient unless it is told not to",
        edits=((TO_EMPTY, TO_EMPTY + "    model.requires_grad_(True)\n"),),
    ),
    Wrong(
        name="the_optimizer_of_the_model_on_meta",
        belief="The optimizer belongs to the model that was made.",
        caught_by="test_what_was_built_trains_as_one_process[tied_and_frozen]",
        says="from parameters that were replaced afterwards",
        edits=(
            (SHARD_BUILT, "    optimizer = make_optimizer(model.parameters())\n" + SHARD_BUILT),
            ("return model, make_optimizer(model.parameters())", "return model, optimizer"),
            (MESH, "    mesh = next(p.device_mesh for p in model.parameters())\n"),
        ),
    ),
    Wrong(
        name="looks_at_the_model_first",
        belief="One look at the real model does no harm.",
        caught_by="test_makes_the_model_once_under_meta",
        says="with memory, or twice",
        edits=((ON_META, "    make_model()\n" + ON_META),),
    ),
    Wrong(
        name="forgets_its_options",
        belief="Options are for wrap.",
        caught_by="test_takes_the_options_of_wrap",
        says="checkpoint is not passed on",
        edits=(
            (
                SHARD_BUILT,
                SHARD_BUILT.replace(
                    "dtype, checkpoint)\n    model.to", "dtype, False)\n    model.to"
                ),
            ),
        ),
    ),
    Wrong(
        name="computes_in_float32",
        belief="A model that was made in float32 computes in float32.",
        caught_by="test_takes_the_options_of_wrap",
        says="dtype is not passed on",
        edits=(
            (
                SHARD_BUILT,
                SHARD_BUILT.replace(
                    "reshard_after_forward, dtype", "reshard_after_forward, torch.float32"
                ),
            ),
        ),
    ),
    Wrong(
        name="makes_it_and_moves_it_to_meta",
        belief="It is on meta before it is sharded.",
        caught_by="test_no_rank_ever_holds_the_model[64]",
        says="the whole model is there before it is sharded",
        edits=((ON_META, '    model = make_model().to("meta")\n'),),
    ),
    Wrong(
        name="initialises_and_then_shards",
        belief="Values come first, sharding frees the rest.",
        caught_by="test_no_rank_of_two_ever_holds_the_model",
        says="all of it is initialised at once",
        edits=(
            (
                SHARD_BUILT,
                SHARD_BUILT.split("    _shard")[0]
                + TO_EMPTY
                + "    for module in model.modules():\n        init(module)\n"
                "    _shard" + SHARD_BUILT.split("    _shard")[1].replace(TO_EMPTY, ""),
            ),
            ("    for module in model.modules():\n        _initialise(module, init)\n", ""),
        ),
    ),
    Wrong(
        name="builds_whatever_it_is_given",
        belief="fully_shard refuses what it cannot do.",
        caught_by="test_refuses_what_wrap_refuses",
        says="the input is not checked before it is used",
        edits=((SHARD_BUILT, "    _shard" + SHARD_BUILT.split("    _shard")[1]),),
    ),
    Wrong(
        name="one_name_a_parameter",
        belief="Tied parameters are in different modules.",
        caught_by="test_has_the_values_of_one_process[2_ranks-blocks_in_blocks]",
        says="or on shards",
        edits=(("recurse=False, remove_duplicate=False)", "recurse=False)"),),
    ),
    Wrong(
        name="evaluates_what_it_has_built",
        belief="Who trains calls train().",
        caught_by="test_has_the_values_of_one_process[1_rank-blocks_in_blocks]",
        says="train mode",
        edits=((TO_EMPTY, TO_EMPTY + "    model.eval()\n"),),
    ),
    Wrong(
        name="draws_in_bfloat16",
        belief="A bfloat16 model is made in bfloat16.",
        caught_by="test_takes_the_options_of_wrap",
        says="'other values': ['embed.weight'",
        edits=(
            (
                TO_EMPTY
                + "    for module in model.modules():\n        _initialise(module, init)\n",
                TO_EMPTY + "    for module in model.modules():\n        _initialise(module, init)\n"
                "    with torch.no_grad():\n        for p in model.parameters():\n            p.copy_(p.to(dtype))\n",
            ),
        ),
    ),
    # Part 4: checkpoints
    Wrong(
        name="saves_the_weights_only",
        belief="The weights are what has been learnt.",
        caught_by="test_goes_on_as_if_it_had_not_been_interrupted[2_ranks_to_4]",
        says="not everything is saved",
        edits=(
            (
                '{"model": weights, "optimizer": state}, checkpoint_id=Path',
                '{"model": weights}, checkpoint_id=Path',
            ),
            (
                '{"model": weights, "optimizer": state}, checkpoint_id=newest',
                '{"model": weights}, checkpoint_id=newest',
            ),
        ),
    ),
    Wrong(
        name="keeps_its_learning_rate",
        belief="The tensors are loaded in place, and settings are the program's.",
        caught_by="test_goes_on_as_if_it_had_not_been_interrupted[2_ranks_to_4]",
        says="lr of group 0",
        edits=(
            (
                "    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)\n",
                "",
            ),
        ),
    ),
    Wrong(
        name="keeps_old_gradients",
        belief="Loading is about weights.",
        caught_by="test_goes_on_as_if_it_had_not_been_interrupted[2_ranks_to_4]",
        says="gradients of before are still there",
        edits=(
            (
                "    optimizer.zero_grad()\n    weights, state = get_state",
                "    weights, state = get_state",
            ),
        ),
    ),
    Wrong(
        name="returns_the_step_as_text",
        belief="The name of the folder is the step.",
        caught_by="test_goes_on_as_if_it_had_not_been_interrupted[2_ranks_to_1_built]",
        says="does not return the step",
        edits=(("    return int(newest.name)\n", "    return newest.name\n"),),
    ),
    Wrong(
        name="keeps_the_newest_only",
        belief="An old checkpoint is of no use.",
        caught_by="test_an_older_checkpoint_stays",
        says="a checkpoint is written over one from before, or takes it away",
        edits=(
            (
                SAVE_CALL,
                SAVE_CALL + "    if newest is not None and dist.get_rank() == 0:\n"
                "        import shutil\n\n        shutil.rmtree(newest)\n",
            ),
        ),
    ),
    Wrong(
        name="keeps_two",
        belief="The one before the newest is enough.",
        caught_by="test_an_older_checkpoint_stays",
        says="or takes it away",
        edits=(
            (
                SAVE_CALL,
                SAVE_CALL + "    if dist.get_rank() == 0:\n"
                "        import shutil\n\n"
                "        steps = sorted(int(path.name) for path in Path(folder).iterdir())\n"
                "        for old in steps[:-2]:\n"
                "            shutil.rmtree(Path(folder) / str(old))\n"
                "    dist.barrier()\n",
            ),
        ),
    ),
    Wrong(
        name="folders_are_paths",
        belief="A path is a Path.",
        caught_by="test_goes_on_as_if_it_had_not_been_interrupted[2_ranks_to_1_built]",
        says="unsupported operand type",
        edits=(("checkpoint_id=Path(folder) / str(step)", "checkpoint_id=folder / str(step)"),),
        raises=TypeError,
    ),
    Wrong(
        name="settings_of_the_first_group",
        belief="An optimizer has one learning rate.",
        caught_by="test_goes_on_as_if_it_had_not_been_interrupted[2_ranks_to_4]",
        says="lr of group 1",
        edits=(
            (
                SET_STATE,
                "    rates = [group['lr'] for group in optimizer.param_groups]\n"
                + SET_STATE
                + "    for group, rate in list(zip(optimizer.param_groups, rates))[1:]:\n"
                "        group['lr'] = rate\n",
            ),
        ),
    ),
    Wrong(
        name="rank_0_saves_for_all",
        belief="With cpu_offload the others have nothing to do, and rank 0 has room.",
        caught_by="test_a_rank_has_to_do_with_its_own_part_only",
        says="save, above the baseline on rank 0",
        edits=(
            (
                "    weights, state = get_state_dict(model, optimizer)\n    # A folder",
                "    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
                "    weights, state = get_state_dict(model, optimizer, options=whole)\n    # A folder",
            ),
        ),
    ),
    Wrong(
        name="saves_the_whole_model_on_every_rank",
        belief="A full state dict fits every number of ranks.",
        caught_by="test_a_rank_has_to_do_with_its_own_part_only",
        says="a rank gathers, or reads",
        edits=(
            (
                "    weights, state = get_state_dict(model, optimizer)\n    # A folder",
                "    whole = StateDictOptions(full_state_dict=True)\n"
                "    weights, state = get_state_dict(model, optimizer, options=whole)\n    # A folder",
            ),
        ),
    ),
    Wrong(
        name="loads_the_whole_model_on_every_rank",
        belief="Every rank reads everything and takes its part.",
        caught_by="test_a_rank_has_to_do_with_its_own_part_only",
        says="load, above the baseline",
        edits=(
            (
                "    weights, state = get_state_dict(model, optimizer)\n    dcp.load",
                "    whole = StateDictOptions(full_state_dict=True)\n"
                "    weights, state = get_state_dict(model, optimizer, options=whole)\n    dcp.load",
            ),
            ("optim_state_dict=state)\n", "optim_state_dict=state, options=whole)\n"),
        ),
    ),
    Wrong(
        name="every_rank_gathers_the_file",
        belief="full_tensor() is for every rank, and rank 0 writes.",
        caught_by="test_a_rank_has_to_do_with_its_own_part_only",
        says="every rank gathers the whole model for itself",
        edits=(
            (
                WHOLE_WEIGHTS,
                "    weights = {\n"
                "        name: value.full_tensor() if isinstance(value, DTensor) else value\n"
                "        for name, value in model.state_dict().items()\n    }\n",
            ),
        ),
    ),
    Wrong(
        name="a_folder_is_a_checkpoint",
        belief="The folder with the highest number is the newest checkpoint.",
        caught_by="test_a_killed_save_leaves_the_checkpoint_before[1_rank]",
        says="a checkpoint counts before it is complete",
        edits=(
            (
                'done = [path.parent for path in Path(folder).glob("*/.metadata")]',
                'done = list(Path(folder).glob("*"))',
            ),
        ),
    ),
    Wrong(
        name="makes_room_first",
        belief="Two checkpoints at a time do not fit.",
        caught_by="test_a_killed_save_leaves_the_checkpoint_before[1_rank]",
        says="it is written over the old one",
        edits=(
            (
                SAVE_CALL,
                "    if newest is not None:\n        import shutil\n\n        shutil.rmtree(newest)\n"
                + SAVE_CALL,
            ),
        ),
    ),
    Wrong(
        name="a_leftover_is_in_the_way",
        belief="The folder of a step cannot be there yet.",
        caught_by="test_a_killed_save_leaves_the_checkpoint_before[1_rank]",
        says="File exists",
        edits=((SAVE_CALL, "    (Path(folder) / str(step)).mkdir(parents=True)\n" + SAVE_CALL),),
        raises=FileExistsError,
    ),
    Wrong(
        name="points_to_the_newest",
        belief="A small file is written at once.",
        caught_by="test_a_killed_save_leaves_the_checkpoint_before[1_rank]",
        says="killed when latest was just opened",
        edits=((SAVE_CALL, SAVE_CALL + POINT + "    dist.barrier()\n"), (BY_NAME, BY_POINTER)),
    ),
    Wrong(
        name="returns_before_it_points",
        belief="The others have written their parts, and need not wait for rank 0.",
        caught_by="test_a_checkpoint_counts_when_every_rank_has_written[0]",
        says="a rank does not wait until all the others have written",
        edits=((SAVE_CALL, SAVE_CALL + POINT), (BY_NAME, BY_POINTER)),
    ),
    Wrong(
        name="points_first",
        belief="Where it will be is known before it is there.",
        caught_by="test_a_checkpoint_counts_when_every_rank_has_written[1]",
        says="expected  step 1 or 5, while rank 1 has not written all",
        edits=(
            (
                SAVE_CALL,
                "    dist.barrier()\n    Path(folder).mkdir(exist_ok=True)\n" + POINT + SAVE_CALL,
            ),
            (BY_NAME, BY_POINTER),
        ),
    ),
    Wrong(
        name="only_rank_0_knows_how_it_ended",
        belief="The others wait in a barrier, and finally it is reached.",
        caught_by="test_a_save_that_fails_at_its_end_is_no_checkpoint",
        says="do not tell each other how the last operation has ended",
        edits=(
            (
                SAVE_CALL,
                SAVE_CALL.replace("str(step)", 'f"{step}.partial"') + "    try:\n"
                "        if dist.get_rank() == 0:\n"
                '            os.rename(Path(folder) / f"{step}.partial", Path(folder) / str(step))\n'
                "    finally:\n"
                "        dist.barrier()\n",
            ),
            (
                """    done = [path.parent for path in Path(folder).glob("*/.metadata")]
""",
                """    done = [path for path in Path(folder).glob("*") if path.name.isdigit()]
""",
            ),
        ),
    ),
    Wrong(
        name="makes_the_folder_first",
        belief="An empty folder is nothing.",
        caught_by="test_refuses_a_step_that_is_not_above_the_newest",
        says="the folder is written to before the step is checked",
        edits=(
            (
                "    newest = _newest(folder)\n    if step < 1",
                "    Path(folder).mkdir(exist_ok=True)\n    newest = _newest(folder)\n    if step < 1",
            ),
        ),
    ),
    Wrong(
        name="goes_on_without_a_checkpoint",
        belief="A save that fails must not end the training.",
        caught_by="test_every_rank_raises_where_one_cannot_write[1]",
        says="do not tell each other how writing has ended",
        edits=(
            (
                SAVE_CALL,
                "    try:\n"
                "        dcp.save({'model': weights, 'optimizer': state}, checkpoint_id=Path(folder) / str(step))\n"
                "    except BaseException as error:\n        print(error)\n",
            ),
        ),
    ),
    Wrong(
        name="any_step_again",
        belief="A step that is saved again is saved better.",
        caught_by="test_refuses_a_step_that_is_not_above_the_newest",
        says="for step 2, where the newest checkpoint is of step 2",
        edits=(
            ("if step < 1 or (newest is not None and step <= int(newest.name)):", "if step < 1:"),
        ),
    ),
    Wrong(
        name="a_step_of_0",
        belief="Before the first step is step 0.",
        caught_by="test_refuses_a_step_that_is_not_above_the_newest",
        says="for step 0",
        edits=(("if step < 1 or (newest", "if step < 0 or (newest"),),
    ),
    Wrong(
        name="the_newest_by_name",
        belief="max() of the names is the newest.",
        caught_by="test_refuses_a_step_that_is_not_above_the_newest",
        says="for step 3, where the newest checkpoint is of step 10",
        edits=(("key=lambda path: int(path.name)", "key=lambda path: path.name"),),
    ),
    Wrong(
        name="a_folder_always_has_one",
        belief="Who loads has saved.",
        caught_by="test_refuses_a_folder_without_a_checkpoint",
        says="the input is not checked before it is used",
        edits=(
            (
                '    if newest is None:\n        raise ValueError(f"no checkpoint in {folder}")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="loads_what_has_its_names",
        belief="dcp finds out what does not fit.",
        caught_by="test_refuses_the_checkpoint_of_another_model",
        says="where the model has one block less",
        edits=((SAME_IN_LOAD, ""),),
    ),
    Wrong(
        name="compares_names_only",
        belief="Models with the same names are the same.",
        caught_by="test_refuses_the_checkpoint_of_another_model",
        says="where the model has another width",
        edits=(
            ('getattr(entry, "size", None) for n', "0 for n"),
            (SAME_IN_LOAD, SAME_IN_LOAD.replace("w.shape", "0").replace(" w in", " w in")),
        ),
    ),
    # Part 4: the whole file
    Wrong(
        name="rank_0_gathers_alone",
        belief="Rank 0 writes, so rank 0 gathers.",
        caught_by="test_one_file_holds_the_model_as_it_is_without_wrap",
        says="waits in a collective call that rank 1 never makes",
        edits=(
            (WHOLE_WEIGHTS, ""),
            ("        partial = Path(", "    " + WHOLE_WEIGHTS + "        partial = Path("),
            (
                "        os.replace(partial, path)\n    dist.barrier()\n",
                "        os.replace(partial, path)\n",
            ),
        ),
    ),
    Wrong(
        name="returns_before_it_is_there",
        belief="Only rank 0 has something to wait for.",
        caught_by="test_one_file_holds_the_model_as_it_is_without_wrap",
        says="this rank returns before rank 0 has written",
        edits=(
            (
                "        os.replace(partial, path)\n    dist.barrier()\n",
                "        os.replace(partial, path)\n",
            ),
        ),
    ),
    Wrong(
        name="saves_rank_0s_shards",
        belief="state_dict() of rank 0 is the model's.",
        caught_by="test_one_file_holds_the_model_as_it_is_without_wrap",
        says="shards are saved",
        edits=(
            (
                WHOLE_WEIGHTS,
                "    weights = {\n"
                "        name: value.to_local() if isinstance(value, DTensor) else value\n"
                "        for name, value in model.state_dict().items()\n    }\n",
            ),
        ),
    ),
    Wrong(
        name="wraps_the_state_dict",
        belief="A checkpoint has a model and perhaps more.",
        caught_by="test_one_file_holds_the_model_as_it_is_without_wrap",
        says="not of the state dict of the model without wrap",
        edits=(("torch.save(weights, partial)", 'torch.save({"model": weights}, partial)'),),
    ),
    Wrong(
        name="every_rank_loads_the_first_rows",
        belief="A rank copies as many rows as it has.",
        caught_by="test_a_sharded_model_loads_the_file_of_one_process[2_ranks]",
        says="has not got its part",
        edits=(
            (
                SET_WHOLE,
                "    for name, value in model.state_dict().items():\n"
                "        mine = value.to_local() if isinstance(value, DTensor) else value\n"
                "        mine.copy_(weights[name][: len(mine)] if mine.dim() else weights[name])\n",
            ),
        ),
    ),
    Wrong(
        name="writes_in_place",
        belief="torch.save either works or raises.",
        caught_by="test_the_file_is_complete_or_is_not_there[1_rank]",
        says="half a file is there under its name",
        edits=(
            ("        torch.save(weights, partial)\n", "        torch.save(weights, path)\n"),
            ("        os.replace(partial, path)\n", ""),
        ),
    ),
    Wrong(
        name="takes_the_old_file_away",
        belief="rename() needs a free name.",
        caught_by="test_the_file_from_before_stays_until_the_new_one_is_complete[1_rank]",
        says="taken away before the new one is there",
        edits=(
            (
                "        os.replace(partial, path)\n",
                "        Path(path).unlink(missing_ok=True)\n        os.rename(partial, path)\n",
            ),
        ),
    ),
    Wrong(
        name="puts_the_old_file_back",
        belief="Whoever has a copy may write in place.",
        caught_by="test_the_file_from_before_stays_until_the_new_one_is_complete[1_rank]",
        says="the file is written in place",
        edits=(
            (
                """        torch.save(weights, partial)
        os.replace(partial, path)
""",
                """        if Path(path).exists():
            os.replace(path, partial)
        try:
            torch.save(weights, path)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            if partial.exists():
                os.replace(partial, path)
            raise
        partial.unlink(missing_ok=True)
""",
            ),
        ),
    ),
    Wrong(
        name="loads_new_parameters",
        belief="assign=True saves a copy.",
        caught_by="test_a_sharded_model_loads_the_file_of_one_process[2_ranks]",
        says="those that the optimizer has are others",
        edits=(
            (
                SET_WHOLE,
                """    from torch.distributed.tensor import distribute_tensor

    for name, held in model.state_dict().items():
        if isinstance(held, DTensor):
            weights[name] = distribute_tensor(weights[name], held.device_mesh, held.placements)
    model.load_state_dict(weights, assign=True)
""",
            ),
        ),
    ),
    Wrong(
        name="loads_what_fits",
        belief="strict=False loads what it can.",
        caught_by="test_refuses_a_file_that_is_not_of_the_model",
        says="a name too few",
        edits=(
            (SAME_IN_WHOLE, ""),
            ("full_state_dict=True))\n", "full_state_dict=True, strict=False))\n"),
        ),
    ),
    Wrong(
        name="extra_names_do_not_matter",
        belief="What the model does not have is not loaded.",
        caught_by="test_refuses_a_file_that_is_not_of_the_model",
        says="a name too many",
        edits=(
            (
                SAME_IN_WHOLE,
                "    weights = {n: w for n, w in weights.items() if n in model.state_dict()}\n"
                + SAME_IN_WHOLE.replace("weights.items()}", "weights.items()}"),
            ),
        ),
    ),
    Wrong(
        name="names_in_the_file_are_enough",
        belief="The names say what a weight is.",
        caught_by="test_refuses_a_file_that_is_not_of_the_model",
        says="another shape",
        edits=(
            (
                SAME_IN_WHOLE,
                SAME_IN_WHOLE.replace("weight.shape for", "0 for").replace("w.shape", "0"),
            ),
        ),
    ),
]

WRONG = [*WRAP, *STEP_AND_BUILD]
