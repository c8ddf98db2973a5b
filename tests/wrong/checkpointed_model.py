"""Mistakes in checkpointed_model, each with the spec that must catch it."""

from kit.answers.loading import Wrong

GUARD = """        if not (self.use_checkpoint and self.training):
            return _run(blocks, x, mask)
"""
EACH = "        x = checkpoint(block, x, mask=mask, use_reentrant=False)\n"
SEGMENT = "            x = checkpoint(_run_checkpointed, segment, x, mask, use_reentrant=False)\n"
SEGMENTS = f"""        for start in range(0, len(blocks), self.segment_size):
            segment = blocks[start : start + self.segment_size]
            # Checkpoints within a checkpoint: the recomputation keeps inputs, and not insides.
{SEGMENT}"""
CHECKED = (
    "        if self.segment_size == 1:\n            return _run_checkpointed(blocks, x, mask)\n"
)
UPDATE = "        update: Tensor = self.down(self.dropout(self.relu(self.up(x))))\n"
PATCH = "        block.forward = _Checkpointed(block, block.forward, keep)\n"
CALL = """        # Bound first: checkpoint() would take a keyword argument such as `debug` for its own.
        run = partial(self.forward, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)
"""
TRAINING = """        if not self.block.training:
            return self.forward(*args, **kwargs)
"""
SELECT = """        if self.keep:
            keeping, replaying = create_selective_checkpoint_contexts(self.keep)
"""
HELD = """    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
"""
ENTER = """    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [dict(norm.named_buffers()) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
"""
TWICE = """    if any(isinstance(vars(block).get("forward"), _Checkpointed) for block in blocks):
        raise ValueError(f"these {block_type.__name__} are checkpointed already")
"""
KEPT = """    for op in keep:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"keep takes overloads, such as aten.mm.default, and not {op!r}")
"""
BLOCKS = (
    "    blocks = list(dict.fromkeys(_outermost(model, block_type)))  # a shared block comes once\n"
)


def by_hand(around: str, *, restore: bool = True) -> str:
    """A checkpoint written by hand, whose recomputation runs in the context `around`."""
    return f"""

class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.run, ctx.random, ctx.params = run, torch.get_rng_state(), params
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        ctx.dtype = torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        after = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad(), {around}:
            output = ctx.run(x)
        {"torch.set_rng_state(after)" if restore else "pass"}
        leaves = [x, *ctx.params]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        return None, *[next(found) if leaf.requires_grad else None for leaf in leaves]


def _run(blocks"""


USE_BY_HAND = (
    EACH,
    "        x = _ByHand.apply(\n"
    "            lambda t, block=block: block(t, mask=mask), x, *block.parameters()\n"
    "        )\n",
)
SIMPLE_SEGMENT = (SEGMENT, "            x = _run_checkpointed(segment, x, mask)\n")

WRONG = [
    # Part 1
    Wrong(
        name="multiplies_by_the_mask",
        belief="0 times anything is 0.",
        caught_by="test_a_block_adds_its_feed_forward_to_its_input",
        says="0 times infinity",
        edits=(("update.masked_fill(~mask.unsqueeze(-1), 0.0)", "update * mask.unsqueeze(-1)"),),
    ),
    Wrong(
        name="relu_as_a_function",
        belief="A layer without weights is no child.",
        caught_by="test_a_block_adds_its_feed_forward_to_its_input",
        says="where the contract has a child",
        edits=(
            ("        self.relu = nn.ReLU()\n", ""),
            ("self.relu(self.up(x))", "torch.relu(self.up(x))"),
        ),
    ),
    Wrong(
        name="another_default",
        belief="Defaults are a matter of taste.",
        caught_by="test_a_model_is_its_blocks_one_after_another",
        says="that is another default",
        edits=(("        dropout: float = 0.1,\n", "        dropout: float = 0.2,\n"),),
    ),
    Wrong(
        name="frozen_blocks_plain",
        belief="Without gradients of its own a block holds nothing.",
        caught_by="test_recomputes_in_every_case[frozen_blocks]",
        says="left out in this case",
        edits=(
            (
                EACH,
                "        if not any(p.requires_grad for p in block.parameters()):\n"
                "            x = block(x, mask=mask)\n"
                "            continue\n" + EACH,
            ),
        ),
    ),
    Wrong(
        name="keeps_the_inputs_of_the_last_step",
        belief="They are held by the checkpoints anyway.",
        caught_by="test_holds_nothing_after_the_backward_pass[each_block]",
        says="kept on the model",
        edits=(
            (
                CHECKED,
                "        self.seen: list[Tensor] = []\n"
                "        if self.segment_size == 1:\n"
                "            for block in blocks:\n"
                "                self.seen.append(x)\n"
                "                x = checkpoint(block, x, mask=mask, use_reentrant=False)\n"
                "            return x\n",
            ),
        ),
    ),
    Wrong(
        name="no_residual",
        belief="A block returns what its layers return.",
        caught_by="test_a_block_adds_its_feed_forward_to_its_input",
        says="the input is not added",
        edits=(("return x + update", "return update"),),
    ),
    Wrong(
        name="a_mask_turned_round",
        belief="True in a mask means masked.",
        caught_by="test_a_block_adds_its_feed_forward_to_its_input",
        says="output under a mask",
        edits=(("masked_fill(~mask", "masked_fill(mask"),),
    ),
    Wrong(
        name="not_wide_inside",
        belief="The inside is as wide as the block.",
        caught_by="test_a_block_adds_its_feed_forward_to_its_input",
        says="not four times as wide",
        edits=(
            ("nn.Linear(hidden_dim, 4 * hidden_dim)", "nn.Linear(hidden_dim, 2 * hidden_dim)"),
            ("nn.Linear(4 * hidden_dim, hidden_dim)", "nn.Linear(2 * hidden_dim, hidden_dim)"),
        ),
    ),
    Wrong(
        name="no_dropout_inside",
        belief="Dropout would make the recomputation differ.",
        caught_by="test_a_block_adds_its_feed_forward_to_its_input[training]",
        says="something is left out",
        edits=(
            ("self.down(self.dropout(self.relu(self.up(x))))", "self.down(self.relu(self.up(x)))"),
        ),
    ),
    Wrong(
        name="one_block_repeated",
        belief="[block] * n makes n blocks.",
        caught_by="test_a_model_is_its_blocks_one_after_another",
        says="one block is repeated",
        edits=(
            (
                "            MemoryIntensiveBlock(hidden_dim, dropout) for _ in range(num_layers)\n",
                "            [MemoryIntensiveBlock(hidden_dim, dropout)] * num_layers\n",
            ),
        ),
    ),
    Wrong(
        name="dropout_for_nobody",
        belief="The default of the block will do.",
        caught_by="test_a_model_is_its_blocks_one_after_another",
        says="dropout of the blocks",
        edits=(("MemoryIntensiveBlock(hidden_dim, dropout)", "MemoryIntensiveBlock(hidden_dim)"),),
    ),
    Wrong(
        name="no_mask_in_eval",
        belief="A mask is for training.",
        caught_by="test_a_model_is_its_blocks_one_after_another[eval]",
        says="without its mask",
        edits=(("        x = block(x, mask=mask)\n", "        x = block(x)\n"),),
    ),
    Wrong(
        name="the_last_block_plain",
        belief="The last block is the first to be recomputed, so it need not be.",
        caught_by="test_each_block_runs_once_more_in_training",
        says="1: that block is not checkpointed",
        edits=(
            (
                EACH,
                "        if block is blocks[-1]:\n"
                "            x = block(x, mask=mask)\n"
                "        else:\n"
                "            x = checkpoint(block, x, mask=mask, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="the_first_block_plain",
        belief="An input without gradient cannot be checkpointed, so the first block is not.",
        caught_by="test_holds_one_input_a_block_between_forward_and_backward",
        says="a block is not checkpointed",
        edits=(
            (
                EACH,
                "        if block is blocks[0]:\n"
                "            x = block(x, mask=mask)\n"
                "        else:\n"
                "            x = checkpoint(block, x, mask=mask, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="a_rehearsal_for_the_random_state",
        belief="To find out whether a block draws numbers, run it.",
        caught_by="test_each_block_runs_once_more_in_training",
        says="more than once in the forward pass itself",
        edits=(
            (
                EACH,
                "        with torch.no_grad(), torch.random.fork_rng():\n"
                "            block(x, mask=mask)\n" + EACH,
            ),
        ),
    ),
    Wrong(
        name="checkpoints_in_eval",
        belief="A backward pass is a backward pass.",
        caught_by="test_each_block_runs_once_where_nothing_is_recomputed[eval]",
        says="self.training, or use_checkpoint, is not asked",
        edits=(("if not (self.use_checkpoint and self.training):", "if not self.use_checkpoint:"),),
    ),
    Wrong(
        name="use_checkpoint_unread",
        belief="Training means checkpointing.",
        caught_by="test_each_block_runs_once_where_nothing_is_recomputed[switched_off]",
        says="self.training, or use_checkpoint, is not asked",
        edits=(("if not (self.use_checkpoint and self.training):", "if not self.training:"),),
    ),
    Wrong(
        name="gradients_switched_on",
        belief="A checkpoint needs gradients, so they are switched on.",
        caught_by="test_each_block_runs_once_where_nothing_is_recomputed[no_grad]",
        says="gradients are switched on again inside",
        edits=(
            (
                CHECKED,
                "        if self.segment_size == 1:\n"
                "            with torch.enable_grad():\n"
                "                return _run_checkpointed(blocks, x, mask)\n",
            ),
        ),
    ),
    Wrong(
        name="no_checkpoint_with_a_mask",
        belief="A checkpoint takes no keyword arguments.",
        caught_by="test_recomputes_in_every_case[mask]",
        says="left out in this case",
        edits=(
            (
                "(self.use_checkpoint and self.training)",
                "(self.use_checkpoint and self.training and mask is None)",
            ),
        ),
    ),
    Wrong(
        name="no_checkpoint_under_autocast",
        belief="AMP saves enough, and the two do not mix.",
        caught_by="test_recomputes_in_every_case[autocast]",
        says="left out in this case",
        edits=(
            (
                GUARD,
                "        if torch.is_autocast_enabled(x.device.type):\n            return _run(blocks, x, mask)\n"
                + GUARD,
            ),
        ),
    ),
    Wrong(
        name="no_checkpoint_where_something_is_frozen",
        belief="A block with frozen parameters is a frozen block.",
        caught_by="test_recomputes_in_every_case[frozen_biases]",
        says="left out in this case",
        edits=(
            (
                GUARD,
                "        if not all(p.requires_grad for p in self.parameters()):\n            return _run(blocks, x, mask)\n"
                + GUARD,
            ),
        ),
    ),
    Wrong(
        name="one_checkpoint_around_everything",
        belief="The more is checkpointed, the more is saved.",
        caught_by="test_peaks_at_one_input_a_block_and_one_inside",
        says="one checkpoint around everything",
        edits=(
            (
                "            return _run_checkpointed(blocks, x, mask)\n",
                "            return checkpoint(_run, blocks, x, mask, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="a_checkpoint_for_each_layer",
        belief="The finer, the better: checkpoint up, relu, dropout and down.",
        caught_by="test_peaks_at_one_input_a_block_and_one_inside[12_blocks]",
        says="checkpoints around the layers within a block",
        edits=(
            (
                UPDATE,
                "        update = x\n"
                "        for layer in (self.up, self.relu, self.dropout, self.down):\n"
                "            update = checkpoint(layer, update, use_reentrant=False)\n",
            ),
            (EACH, "        x = block(x, mask=mask)\n"),
        ),
    ),
    Wrong(
        name="checkpoints_in_pairs",
        belief="Two blocks a checkpoint halve the inputs.",
        caught_by="test_peaks_at_one_input_a_block_and_one_inside[5_blocks]",
        says="more than one block's inside",
        edits=(
            (
                "            return _run_checkpointed(blocks, x, mask)\n",
                "            for start in range(0, len(blocks), 2):\n"
                "                pair = blocks[start : start + 2]\n"
                "                x = checkpoint(_run, pair, x, mask, use_reentrant=False)\n"
                "            return x\n",
            ),
        ),
    ),
    Wrong(
        name="never_checkpoints",
        belief="use_checkpoint is for the trainer to read.",
        caught_by="test_needs_less_than_half_of_the_plain_model",
        says="inside of all blocks is there at once",
        edits=((GUARD, "        return _run(blocks, x, mask)\n"),),
    ),
    Wrong(
        name="keeps_activations_for_a_plot",
        belief="A reference more costs nothing.",
        caught_by="test_holds_one_input_a_block_between_forward_and_backward",
        says="something of its inside is kept",
        edits=(
            (
                UPDATE,
                "        self.hidden = self.relu(self.up(x))\n"
                "        update = self.down(self.dropout(self.hidden))\n",
            ),
        ),
    ),
    Wrong(
        name="decides_in_the_constructor",
        belief="Nobody changes a model after it has been made.",
        caught_by="test_follows_switches_that_are_set_later",
        says="read when the model is made",
        edits=(
            (
                "        self.use_checkpoint = use_checkpoint\n",
                "        self.use_checkpoint = use_checkpoint\n        self._use = use_checkpoint\n",
            ),
            ("if not (self.use_checkpoint and", "if not (self._use and"),
        ),
    ),
    Wrong(
        name="one_wide_is_none",
        belief="At least 1 means above 1.",
        caught_by="test_takes_the_smallest_numbers",
        says="hidden_dim must be at least 1, not 1",
        raises=ValueError,
        edits=(("if hidden_dim < 1:", "if hidden_dim <= 1:"),),
    ),
    Wrong(
        name="no_layers_are_fine",
        belief="An empty loop does no harm.",
        caught_by="test_refuses_numbers_out_of_range[no_layers]",
        says="not checked",
        edits=(
            (
                "if not 1 <= segment_size <= num_layers",
                "if not 1 <= segment_size <= max(num_layers, 1)",
            ),
        ),
    ),
    Wrong(
        name="no_width_is_fine",
        belief="nn.Linear checks its sizes.",
        caught_by="test_refuses_numbers_out_of_range[no_width]",
        says="not checked",
        edits=(("if hidden_dim < 1:", "if hidden_dim < 0:"),),
    ),
    Wrong(
        name="segments_beyond_the_model",
        belief="A slice that is too long is cut.",
        caught_by="test_refuses_numbers_out_of_range[segment_above_all]",
        says="not checked",
        edits=(
            (
                "if not 1 <= segment_size <= num_layers",
                "if not (1 <= segment_size and 1 <= num_layers)",
            ),
        ),
    ),
    Wrong(
        name="segments_of_nothing",
        belief="range() complains about a step of 0.",
        caught_by="test_refuses_numbers_out_of_range[no_segment]",
        says="not checked",
        edits=(("if not 1 <= segment_size <= num_layers", "if not segment_size <= num_layers"),),
    ),
    Wrong(
        name="clips_the_dropout",
        belief="A rate below 0 means no dropout.",
        caught_by="test_refuses_numbers_out_of_range[dropout_below_0]",
        says="not checked",
        edits=(("nn.Dropout(dropout)", "nn.Dropout(max(dropout, 0.0))"),),
    ),
    Wrong(
        name="looks_at_the_width_only",
        belief="What matters is the last dimension.",
        caught_by="test_refuses_wrong_shapes[no_batch]",
        says="not checked",
        edits=(("if x.dim() != 3 or x.shape[-1]", "if x.shape[-1]"),),
    ),
    Wrong(
        name="looks_at_the_dimensions_only",
        belief="A wrong width will show.",
        caught_by="test_refuses_wrong_shapes[narrow]",
        says="before it is used",
        edits=(("if x.dim() != 3 or x.shape[-1] != self.hidden_dim:", "if x.dim() != 3:"),),
    ),
    Wrong(
        name="too_wide_is_wide_enough",
        belief="An input must have enough columns.",
        caught_by="test_refuses_wrong_shapes[wide]",
        says="before it is used",
        edits=(("x.shape[-1] != self.hidden_dim:", "x.shape[-1] < self.hidden_dim:"),),
    ),
    Wrong(
        name="looks_at_shapes_in_training",
        belief="Bad input comes in training.",
        caught_by="test_refuses_wrong_shapes[mask_3_dims]",
        says="in eval mode",
        edits=(
            (
                "        self._check_shapes(x, mask)\n",
                "        if self.training:\n            self._check_shapes(x, mask)\n",
            ),
        ),
    ),
    Wrong(
        name="a_mask_of_any_shape",
        belief="masked_fill checks the mask.",
        caught_by="test_refuses_wrong_shapes[mask_1_dim]",
        says="not checked",
        edits=(
            (
                "if mask is not None and mask.shape != x.shape[:2]:",
                "if mask is not None and mask.dim() > 2:",
            ),
        ),
    ),
    Wrong(
        name="a_mask_that_broadcasts",
        belief="One mask for all sequences is a mask.",
        caught_by="test_refuses_wrong_shapes[one_mask]",
        says="not checked",
        edits=(
            ("mask.shape != x.shape[:2]:", "(mask.dim() != 2 or mask.shape[1] != x.shape[1]):"),
        ),
    ),
    # Part 2
    Wrong(
        name="other_random_numbers",
        belief="Dropout is random anyway.",
        caught_by="test_gives_the_same_output_and_gradients[x_with_gradient-each_block]",
        says="draws other random numbers",
        edits=((EACH, EACH.replace("use_reentrant", "preserve_rng_state=False, use_reentrant")),),
    ),
    Wrong(
        name="other_random_numbers_in_segments",
        belief="The checkpoints inside keep the random state.",
        caught_by="test_gives_the_same_output_and_gradients[x_without-segments_of_3]",
        says="draws other random numbers",
        edits=(
            (SEGMENT, SEGMENT.replace("use_reentrant", "preserve_rng_state=False, use_reentrant")),
        ),
    ),
    Wrong(
        name="reentrant",
        belief="The default of old is good enough.",
        caught_by="test_gives_the_same_output_and_gradients[x_without-each_block]",
        says="passes gradients on only if its input requires one",
        edits=(
            (
                EACH,
                "        x = checkpoint(\n"
                "            lambda t, block=block: block(t, mask=mask), x, use_reentrant=True\n"
                "        )\n",
            ),
        ),
    ),
    Wrong(
        name="makes_the_input_require_a_gradient",
        belief="If the checkpoint wants an input with a gradient, it can have one.",
        caught_by="test_gives_the_same_output_and_gradients[x_without-each_block]",
        says="to please the checkpoint",
        edits=(
            (
                EACH,
                "        x = checkpoint(\n"
                "            lambda t, block=block: block(t, mask=mask), x, use_reentrant=True\n"
                "        )\n",
            ),
            (CHECKED, "        x.requires_grad_()\n" + CHECKED),
        ),
    ),
    Wrong(
        name="a_fresh_leaf_for_the_checkpoint",
        belief="detach().requires_grad_() is the input that the checkpoint wants.",
        caught_by="test_gives_the_same_output_and_gradients[x_with_gradient-each_block]",
        says="no gradient of input 0",
        edits=(
            (
                EACH,
                "        x = checkpoint(\n"
                "            lambda t, block=block: block(t, mask=mask), x, use_reentrant=True\n"
                "        )\n",
            ),
            (CHECKED, "        x = x.detach().requires_grad_()\n" + CHECKED),
        ),
    ),
    Wrong(
        name="a_lambda_that_binds_late",
        belief="A lambda in a loop remembers the block of its turn.",
        caught_by="test_gives_the_same_output_and_gradients[x_without-each_block]",
        says="or runs another block than the forward pass did",
        edits=(
            (
                EACH,
                "        x = checkpoint(lambda t: block(t, mask=mask), x, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="drops_the_last_short_segment",
        belief="The blocks divide into segments.",
        caught_by="test_gives_the_same_output_and_gradients[x_without-segments_of_3]",
        says="no gradient of layers.6",
        edits=(
            (
                "range(0, len(blocks), self.segment_size)",
                "range(0, len(blocks) - self.segment_size + 1, self.segment_size)",
            ),
        ),
    ),
    Wrong(
        name="sets_the_random_state_and_leaves_it",
        belief="The same state before and in the recomputation is all that it takes.",
        caught_by="test_leaves_the_random_stream_where_it_would_have_been[each_block]",
        says="not put back after it",
        edits=(
            (
                EACH,
                "        state = torch.get_rng_state()\n"
                "        x = checkpoint(\n"
                "            _from_state, state, block, x, mask, preserve_rng_state=False,\n"
                "            use_reentrant=False,\n"
                "        )\n",
            ),
            (
                "\n\ndef _run(blocks",
                "\n\ndef _from_state(state: Tensor, block: Any, x: Tensor, mask: Any) -> Tensor:\n"
                "    torch.set_rng_state(state)\n"
                "    return block(x, mask=mask)\n"
                "\n\ndef _run(blocks",
            ),
        ),
    ),
    Wrong(
        name="a_seed_for_each_block",
        belief="A seed makes dropout repeatable.",
        caught_by="test_leaves_the_random_stream_where_it_would_have_been",
        says="the next random number after the forward pass",
        edits=(
            (
                EACH,
                "        seed = int(torch.randint(2**31, ()))\n"
                "        x = checkpoint(\n"
                "            _with_seed, seed, block, x, mask, preserve_rng_state=False,\n"
                "            use_reentrant=False,\n"
                "        )\n",
            ),
            (
                "\n\ndef _run(blocks",
                "\n\ndef _with_seed(seed: int, block: Any, x: Tensor, mask: Any) -> Tensor:\n"
                "    torch.manual_seed(seed)\n"
                "    return block(x, mask=mask)\n"
                "\n\ndef _run(blocks",
            ),
        ),
    ),
    Wrong(
        name="recomputes_in_float32",
        belief="autocast is a matter of the forward pass.",
        caught_by="test_recomputes_in_the_precision_of_the_forward_pass[bf16-each_block]",
        says="runs without autocast",
        edits=(("\n\ndef _run(blocks", by_hand("nullcontext()")), USE_BY_HAND, SIMPLE_SEGMENT),
    ),
    Wrong(
        name="recomputes_in_the_default_dtype",
        belief="autocast knows its dtype.",
        caught_by="test_recomputes_in_the_precision_of_the_forward_pass[fp16-each_block]",
        says="or with its default dtype",
        edits=(
            (
                "\n\ndef _run(blocks",
                by_hand("torch.autocast(x.device.type, torch.bfloat16, enabled=ctx.autocast)"),
            ),
            USE_BY_HAND,
            SIMPLE_SEGMENT,
        ),
    ),
    Wrong(
        name="forgets_the_mask_after_the_forward_pass",
        belief="A mask is needed while the forward pass runs.",
        caught_by="test_a_mask_is_there_in_the_recomputation_too[each_block]",
        says="no mask, or another one",
        edits=(
            (
                "            return _run_checkpointed(blocks, x, mask)\n",
                "            self.mask = mask\n"
                "            for block in blocks:\n"
                "                x = checkpoint(self._with_mask, block, x, use_reentrant=False)\n"
                "            self.mask = None if mask is None else torch.ones_like(mask)\n"
                "            return x\n",
            ),
            (
                "    def _check_shapes",
                "    def _with_mask(self, block: Any, x: Tensor) -> Tensor:\n"
                "        return block(x, mask=self.mask)\n\n"
                "    def _check_shapes",
            ),
        ),
    ),
    Wrong(
        name="the_mask_on_the_model",
        belief="One forward pass is followed by its backward pass.",
        caught_by="test_bears_several_forward_passes_before_one_backward[each_block]",
        says="overwrites it",
        edits=(
            (
                "            return _run_checkpointed(blocks, x, mask)\n",
                "            self.mask = mask\n"
                "            for block in blocks:\n"
                "                x = checkpoint(self._with_mask, block, x, use_reentrant=False)\n"
                "            return x\n",
            ),
            (
                "    def _check_shapes",
                "    def _with_mask(self, block: Any, x: Tensor) -> Tensor:\n"
                "        return block(x, mask=self.mask)\n\n"
                "    def _check_shapes",
            ),
        ),
    ),
    Wrong(
        name="wraps_the_blocks",
        belief="A wrapper module is the tidy way.",
        caught_by="test_has_the_keys_of_the_blocks_alone",
        says="wrapped in other modules",
        edits=(
            (
                "            MemoryIntensiveBlock(hidden_dim, dropout) for _ in range(num_layers)\n",
                "            nn.Sequential(MemoryIntensiveBlock(hidden_dim, dropout))\n"
                "            for _ in range(num_layers)\n",
            ),
        ),
    ),
    Wrong(
        name="registers_the_segments",
        belief="A list of modules is a ModuleList.",
        caught_by="test_has_the_keys_of_the_blocks_alone",
        says="registered under a second name",
        edits=(
            (
                "        self.segment_size = segment_size\n",
                "        self.segment_size = segment_size\n"
                "        self.segments = nn.ModuleList(nn.Sequential(block) for block in self.layers)\n",
            ),
        ),
    ),
    Wrong(
        name="leaves_out_frozen_blocks",
        belief="A frozen block needs no graph.",
        caught_by="test_trains_around_frozen_blocks[the_first-each_block]",
        says="gradient",
        edits=(
            (
                EACH,
                "        frozen = not any(p.requires_grad for p in block.parameters())\n"
                "        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):\n"
                "            x = checkpoint(block, x, mask=mask, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="thaws_the_first_parameter",
        belief="One parameter that requires a gradient gets the checkpoints going.",
        caught_by="test_trains_around_frozen_blocks[the_last-each_block]",
        says="to please the checkpoint",
        edits=((CHECKED, "        next(self.parameters()).requires_grad_()\n" + CHECKED),),
    ),
    Wrong(
        name="lambdas_in_the_constructor",
        belief="A lambda is copied with the model.",
        caught_by="test_a_copy_is_a_model_of_its_own[each_block]",
        says="still holds the original's blocks",
        edits=(
            (
                "        self.segment_size = segment_size\n",
                "        self.segment_size = segment_size\n"
                "        self._runs = [lambda x, mask, b=b: b(x, mask=mask) for b in self.layers]\n",
            ),
            (
                "            return _run_checkpointed(blocks, x, mask)\n",
                "            for run in self._runs:\n"
                "                x = checkpoint(run, x, mask, use_reentrant=False)\n"
                "            return x\n",
            ),
        ),
    ),
    Wrong(
        name="lambdas_made_in_the_first_step",
        belief="What is not there before the first step is copied rightly.",
        caught_by="test_a_copy_is_a_model_of_its_own[segments_of_2]",
        says="in a first step",
        edits=(
            (
                SEGMENTS,
                "        if not hasattr(self, 'runs'):\n"
                "            self.runs: dict[int, Any] = {}\n"
                "        size = self.segment_size\n"
                "        if size not in self.runs:\n"
                "            self.runs[size] = [\n"
                "                lambda x, mask, part=blocks[i : i + size]: _run_checkpointed(part, x, mask)\n"
                "                for i in range(0, len(blocks), size)\n"
                "            ]\n"
                "        for run in self.runs[size]:\n"
                "            x = checkpoint(run, x, mask, use_reentrant=False)\n",
            ),
        ),
    ),
    # Part 3
    Wrong(
        name="small_models_only",
        belief="Nobody has more than 200 layers.",
        caught_by="test_is_the_square_root_of_a_square_number",
        says="no square root",
        edits=(
            (
                "    return min(range(1, num_layers + 1), key",
                "    return min(range(1, min(num_layers, 20) + 1), key",
            ),
        ),
    ),
    Wrong(
        name="no_segments_with_a_mask",
        belief="A segment takes one input.",
        caught_by="test_holds_one_input_a_segment_between_forward_and_backward[mask]",
        says="in this case only",
        edits=((CHECKED, CHECKED.replace("== 1:", "== 1 or mask is not None:")),),
    ),
    Wrong(
        name="no_segments_under_autocast",
        belief="Nested checkpoints lose autocast.",
        caught_by="test_holds_one_input_a_segment_between_forward_and_backward[autocast]",
        says="in this case only",
        edits=(
            (
                CHECKED,
                CHECKED.replace("== 1:", "== 1 or torch.is_autocast_enabled(x.device.type):"),
            ),
        ),
    ),
    Wrong(
        name="no_segments_without_a_gradient",
        belief="A segment needs an input with a gradient.",
        caught_by="test_holds_one_input_a_segment_between_forward_and_backward[x_without]",
        says="in this case only",
        edits=((CHECKED, CHECKED.replace("== 1:", "== 1 or not x.requires_grad:")),),
    ),
    Wrong(
        name="the_whole_as_one_segment",
        belief="The fewer segments, the fewer inputs.",
        caught_by="test_is_the_square_root_of_a_square_number",
        says="that is no square root",
        edits=(
            (
                "    return min(range(1, num_layers + 1), key=lambda size: -(-num_layers // size) + size)\n",
                "    return num_layers\n",
            ),
        ),
    ),
    Wrong(
        name="half_of_an_input_a_block",
        belief="A recomputed segment is half used up on the average.",
        caught_by="test_is_the_square_root_of_a_square_number",
        says="that is no square root",
        edits=(("-(-num_layers // size) + size)", "-(-num_layers // size) + size / 2)"),),
    ),
    Wrong(
        name="whole_segments_only",
        belief="num_layers // s is the number of segments.",
        caught_by="test_no_other_size_needs_fewer_inputs",
        says="the last, shorter segment is not counted",
        edits=(("-(-num_layers // size) + size)", "num_layers // size + size)"),),
    ),
    Wrong(
        name="a_root_that_is_no_int",
        belief="A square root is a number.",
        caught_by="test_no_other_size_needs_fewer_inputs",
        says="no int",
        edits=(
            (
                "    return min(range(1, num_layers + 1), key=lambda size: -(-num_layers // size) + size)\n",
                "    return num_layers**0.5\n",
            ),
        ),
    ),
    Wrong(
        name="blocks_after_the_last_whole_segment_plain",
        belief="What is left over is little.",
        caught_by="test_a_block_runs_once_or_twice_more[7_by_3]",
        says="1: a block is in no segment",
        edits=(
            (
                SEGMENTS,
                "        whole = len(blocks) // self.segment_size * self.segment_size\n"
                "        for start in range(0, whole, self.segment_size):\n"
                "            segment = blocks[start : start + self.segment_size]\n"
                f"{SEGMENT}"
                "        x = _run(blocks[whole:], x, mask)\n",
            ),
        ),
    ),
    Wrong(
        name="halves_of_halves",
        belief="Checkpoints within checkpoints all the way down hold the least.",
        caught_by="test_a_block_runs_once_or_twice_more[9_by_9]",
        says="above 3",
        edits=(
            (SEGMENT, "            x = _halves(segment, x, mask)\n"),
            (
                "\n\ndef _run(blocks",
                "\n\ndef _halves(blocks: Any, x: Tensor, mask: Any) -> Tensor:\n"
                "    half = len(blocks) // 2\n"
                "    if half == 0:\n"
                "        return _run(blocks, x, mask)\n"
                "    for part in (blocks[:half], blocks[half:]):\n"
                "        x = checkpoint(_halves, part, x, mask, use_reentrant=False)\n"
                "    return x\n"
                "\n\ndef _run(blocks",
            ),
        ),
    ),
    Wrong(
        name="a_rehearsal_for_segments",
        belief="To find out how large a segment is, run it.",
        caught_by="test_a_block_runs_once_or_twice_more",
        says="more than once in the forward pass itself",
        edits=(
            (
                SEGMENT,
                "            with torch.no_grad(), torch.random.fork_rng():\n"
                "                _run(segment, x, mask)\n" + SEGMENT,
            ),
        ),
    ),
    Wrong(
        name="segments_as_checkpoint_sequential",
        belief="One checkpoint a segment is the square-root law.",
        caught_by="test_peaks_at_segments_and_one_segment[16_by_4]",
        says="holds all of its insides",
        edits=((SEGMENT, SEGMENT.replace("_run_checkpointed", "_run")),),
    ),
    Wrong(
        name="the_last_segment_plain",
        belief="The last segment is recomputed first, so it can as well be kept.",
        caught_by="test_peaks_at_segments_and_one_segment[17_by_5]",
        says="a segment is left out",
        edits=(
            (
                SEGMENT,
                "            if start + self.segment_size >= len(blocks):\n"
                "                x = _run(segment, x, mask)\n"
                "            else:\n"
                "                x = checkpoint(_run_checkpointed, segment, x, mask, use_reentrant=False)\n",
            ),
        ),
    ),
    Wrong(
        name="segment_size_unread",
        belief="A checkpoint a block is as good as it gets.",
        caught_by="test_peaks_at_segments_and_one_segment[16_by_4]",
        says="segment_size is not heeded",
        edits=(
            (
                CHECKED,
                "        if self.segment_size:\n            return _run_checkpointed(blocks, x, mask)\n",
            ),
        ),
    ),
    Wrong(
        name="segment_size_is_the_number_of_segments",
        belief="checkpoint_sequential takes the number of segments, and so does this.",
        caught_by="test_holds_one_input_a_segment_between_forward_and_backward",
        says="and not of segments",
        edits=(
            (
                SEGMENTS,
                "        size = -(-len(blocks) // self.segment_size)\n"
                "        for start in range(0, len(blocks), size):\n"
                "            segment = blocks[start : start + size]\n"
                f"{SEGMENT}",
            ),
        ),
    ),
    Wrong(
        name="segments_of_two_at_most",
        belief="Short segments are always safe.",
        caught_by="test_grows_with_the_square_root_of_the_depth",
        says="segment_size is not heeded",
        edits=(
            (
                SEGMENTS,
                "        size = min(self.segment_size, 2)\n"
                "        for start in range(0, len(blocks), size):\n"
                "            segment = blocks[start : start + size]\n"
                f"{SEGMENT}",
            ),
        ),
    ),
    Wrong(
        name="no_layers_no_message",
        belief="min() raises ValueError by itself.",
        caught_by="test_refuses_a_model_without_layers",
        says="does not say which value was wrong",
        edits=(
            (
                '    if num_layers < 1:\n        raise ValueError(f"num_layers must be at least 1, not {num_layers}")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="segments_in_eval",
        belief="Segments are a matter of their size only.",
        caught_by="test_segments_run_once_where_nothing_is_recomputed[eval]",
        says="before segments are made",
        edits=(
            (
                "if not (self.use_checkpoint and self.training):",
                "if self.segment_size == 1 and not (self.use_checkpoint and self.training):",
            ),
        ),
    ),
    Wrong(
        name="segments_made_with_the_model",
        belief="A model's segments are part of its architecture.",
        caught_by="test_follows_a_segment_size_that_is_set_later",
        says="made with the model",
        edits=(
            (
                "        self.segment_size = segment_size\n",
                "        self.segment_size = segment_size\n        self._size = segment_size\n",
            ),
            ("        if self.segment_size == 1:\n", "        if self._size == 1:\n"),
            (
                "        for start in range(0, len(blocks), self.segment_size):\n"
                "            segment = blocks[start : start + self.segment_size]\n",
                "        for start in range(0, len(blocks), self._size):\n"
                "            segment = blocks[start : start + self._size]\n",
            ),
        ),
    ),
    # Part 4
    Wrong(
        name="frozen_blocks_are_no_blocks",
        belief="A frozen block has nothing to recompute for.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="leaves a frozen block out",
        edits=(
            (
                BLOCKS,
                BLOCKS
                + "    blocks = [b for b in blocks if any(p.requires_grad for p in b.parameters())]\n",
            ),
        ),
    ),
    Wrong(
        name="frozen_blocks_of_others_plain",
        belief="A frozen block has nothing to recompute for, at each of its calls.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="a frozen block is left out",
        edits=(
            (
                "        if not self.block.training:\n",
                "        if not (self.block.training and any(p.requires_grad for p in self.block.parameters())):\n",
            ),
        ),
    ),
    Wrong(
        name="hands_on_tensors_only",
        belief="What is recomputed depends on tensors.",
        caught_by="test_a_block_may_take_and_return_anything",
        says="only tensors are handed on",
        edits=(
            (
                CALL,
                "        kwargs = {k: v for k, v in kwargs.items() if not isinstance(v, str)}\n"
                + CALL,
            ),
        ),
    ),
    Wrong(
        name="keyword_arguments_of_the_checkpoint",
        belief="checkpoint() hands all keyword arguments on.",
        caught_by="test_keyword_arguments_may_have_any_name",
        says="takes it for its own",
        edits=(
            (
                CALL,
                "        return checkpoint(\n"
                "            self.forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs\n"
                "        )\n",
            ),
        ),
    ),
    Wrong(
        name="the_first_argument_comes_by_position",
        belief="A block is called with its input first.",
        caught_by="test_keyword_arguments_may_have_any_name",
        says="something must come by position",
        edits=(
            (
                "    def __call__(self, *args: Any, **kwargs: Any) -> Any:\n",
                "    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:\n"
                "        args = (x, *args)\n",
            ),
        ),
    ),
    Wrong(
        name="looks_for_dropout_modules",
        belief="Random numbers are drawn by nn.Dropout.",
        caught_by="test_a_block_may_take_and_return_anything",
        says="draws other random numbers",
        edits=(
            (
                CALL,
                CALL.replace(
                    "use_reentrant",
                    "preserve_rng_state=any(isinstance(m, nn.Dropout) for m in self.block.modules()), use_reentrant",
                ),
            ),
        ),
    ),
    Wrong(
        name="norms_among_the_children",
        belief="A block's norms are its children.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="0.norm2.0.running_mean",
        edits=(("for module in block.modules() if", "for module in block.children() if"),),
    ),
    Wrong(
        name="leaves_other_forwards_alone",
        belief="Who has put a forward on a block will know why.",
        caught_by="test_a_forward_of_the_blocks_own_goes_on_running",
        says="is left out",
        edits=(
            (
                PATCH,
                "        if 'forward' in vars(block):\n            continue\n" + PATCH,
            ),
        ),
    ),
    Wrong(
        name="makes_the_input_of_a_block_require_a_gradient",
        belief="If the checkpoint wants an input with a gradient, a block's can have one.",
        caught_by="test_only_outermost_blocks_are_checkpointed",
        says="to please the checkpoint",
        edits=(
            (
                CALL,
                "        for a in args:\n"
                "            if isinstance(a, Tensor) and a.is_leaf and a.is_floating_point():\n"
                "                a.requires_grad_()\n" + CALL,
            ),
        ),
    ),
    Wrong(
        name="the_forward_of_the_class",
        belief="A block's forward is its class's.",
        caught_by="test_a_forward_of_the_blocks_own_goes_on_running",
        says="not the block's own",
        edits=(
            (
                PATCH,
                "        own = type(block).forward.__get__(block)\n"
                "        block.forward = _Checkpointed(block, own, keep)\n",
            ),
        ),
    ),
    Wrong(
        name="every_forward_of_its_own_is_a_checkpoint",
        belief="Nobody else puts a forward on an instance.",
        caught_by="test_a_forward_of_the_blocks_own_goes_on_running",
        says="checkpointed already",
        raises=ValueError,
        edits=(
            ('isinstance(vars(block).get("forward"), _Checkpointed)', '"forward" in vars(block)'),
        ),
    ),
    Wrong(
        name="a_lambda_made_in_the_first_call",
        belief="What is not there before the first step is copied rightly.",
        caught_by="test_a_deep_copy_checkpoints_its_own_blocks",
        says="a closure",
        edits=(
            (
                CALL,
                "        if not hasattr(self, 'run'):\n"
                "            self.run = lambda *a, f=self.forward, **k: f(*a, **k)\n"
                + CALL.replace("partial(self.forward", "partial(self.run"),
            ),
        ),
    ),
    Wrong(
        name="no_selection_under_autocast",
        belief="Selection and autocast do not mix.",
        caught_by="test_blocks_recompute_in_the_precision_of_their_forward_pass[bf16-keep_dear]",
        says="not heeded under autocast",
        edits=(
            (
                SELECT,
                SELECT.replace("self.keep:", "self.keep and not torch.is_autocast_enabled('cpu'):"),
            ),
        ),
    ),
    Wrong(
        name="statistics_of_its_own_pass_put_back",
        belief="After a backward pass the statistics are those that its forward pass left.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="of which there have been more",
        edits=(
            (
                "        return keeping, _both(_statistics_held(self.block), replaying)",
                "        norms = [m for m in self.block.modules() if isinstance(m, _BatchNorm)]\n"
                "        found: dict[Tensor, Tensor] = {}\n"
                "        return (\n"
                "            _both(_at_the_end(lambda: found.update((b, b.clone()) for m in norms for b in m.buffers())), keeping),\n"
                "            _both(_at_the_end(lambda: [setattr(b, 'data', old.clone()) for b, old in found.items()]), replaying),\n"
                "        )",
            ),
            (
                "@contextmanager\ndef _both(",
                "@contextmanager\n"
                "def _at_the_end(act: Callable[[], Any]) -> Iterator[None]:\n"
                "    try:\n"
                "        yield\n"
                "    finally:\n"
                "        act()\n\n\n"
                "@contextmanager\ndef _both(",
            ),
        ),
    ),
    Wrong(
        name="a_mark_on_the_model",
        belief="A model goes through this once.",
        caught_by="test_takes_blocks_of_two_classes_in_two_calls",
        says="goes by the model",
        edits=(
            (
                TWICE,
                "    if any(hasattr(module, 'done') for module in model.modules()):\n"
                "        raise ValueError('checkpointed already')\n",
            ),
            (PATCH, PATCH + "        block.done = True\n"),
        ),
    ),
    Wrong(
        name="a_tuple_of_classes",
        belief="isinstance() takes several classes, and so does this.",
        caught_by="test_refuses_what_is_no_class_of_modules[two_classes]",
        says="not checked",
        edits=(
            (
                "    if not (isinstance(block_type, type) and issubclass(block_type, nn.Module)):\n",
                "    kinds = block_type if isinstance(block_type, tuple) else (block_type,)\n"
                "    if not all(isinstance(k, type) and issubclass(k, nn.Module) for k in kinds):\n",
            ),
        ),
    ),
    Wrong(
        name="refuses_packets_only",
        belief="What is no packet is an overload.",
        caught_by="test_refuses_to_keep_what_is_no_overload_and_changes_nothing[a_function]",
        says="not checked",
        edits=(
            (
                "not isinstance(op, torch._ops.OpOverload)",
                "isinstance(op, torch._ops.OpOverloadPacket)",
            ),
        ),
    ),
    Wrong(
        name="three_levels_down",
        belief="Blocks are in a list of the model, or in a list of lists.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="stops at the model's own children",
        edits=(
            (
                BLOCKS,
                "    blocks = [\n"
                "        m for name, m in model.named_modules()\n"
                "        if name.count('.') < 3 and isinstance(m, block_type)\n"
                "    ]\n",
            ),
        ),
    ),
    Wrong(
        name="compares_classes_exactly",
        belief="type(m) is block_type finds the blocks.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="compares classes with ==",
        edits=(("if isinstance(child, block_type):", "if type(child) is block_type:"),),
    ),
    Wrong(
        name="asks_for_training_once",
        belief="A model that is handed in for training is in training mode.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="is asked when the model is handed in",
        edits=(
            (
                PATCH,
                "        if block.training:\n            block.forward = _Checkpointed(block, block.forward, keep)\n",
            ),
        ),
    ),
    Wrong(
        name="counts_and_does_nothing",
        belief="A flag on the block is enough.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="1: not checkpointed",
        edits=((PATCH, "        block.gradient_checkpointing = True\n"),),
    ),
    Wrong(
        name="rehearses_the_block",
        belief="The first run is without a graph, the second with one.",
        caught_by="test_recomputes_every_block_wherever_it_is",
        says="blocks run twice",
        edits=(
            (
                CALL,
                "        with torch.no_grad(), torch.random.fork_rng():\n            self.forward(*args, **kwargs)\n"
                + CALL,
            ),
        ),
    ),
    Wrong(
        name="other_dropout_in_models_of_others",
        belief="Dropout is random anyway.",
        caught_by="test_works_on_models_of_the_transformers_library[recompute_all-gpt2]",
        says="draws other random numbers",
        edits=((CALL, CALL.replace("use_reentrant", "preserve_rng_state=False, use_reentrant")),),
    ),
    Wrong(
        name="kwargs_as_positions",
        belief="Keyword arguments can be handed on in their order.",
        caught_by="test_a_block_may_take_and_return_anything",
        says="takes 3 positional arguments",
        raises=TypeError,
        edits=(
            (
                CALL,
                "        return checkpoint(\n"
                "            self.forward, *args, *kwargs.values(),\n"
                "            use_reentrant=False, context_fn=self._contexts,\n"
                "        )\n",
            ),
        ),
    ),
    Wrong(
        name="reentrant_for_models_of_others",
        belief="Both forms take the same arguments.",
        caught_by="test_a_block_may_take_and_return_anything[recompute_all]",
        says="Unexpected keyword arguments",
        raises=ValueError,
        edits=(
            (
                CALL,
                "        return checkpoint(self.forward, *args, use_reentrant=True, **kwargs)\n",
            ),
        ),
    ),
    Wrong(
        name="keyword_arguments_bound_outside",
        belief="The reentrant form works with a partial for the keyword arguments.",
        caught_by="test_a_block_may_take_and_return_anything[recompute_all]",
        says="gradient",
        edits=(
            (
                CALL,
                "        if any(isinstance(a, Tensor) and a.requires_grad for a in args):\n"
                "            return checkpoint(\n"
                "                lambda *a: self.forward(*a, **{\n"
                "                    k: {n: t.detach() for n, t in v.items()} if isinstance(v, dict) else v\n"
                "                    for k, v in kwargs.items()\n"
                "                }),\n"
                "                *args, use_reentrant=False,\n"
                "            )\n" + CALL,
            ),
        ),
    ),
    Wrong(
        name="returns_one_tensor",
        belief="A block returns one tensor.",
        caught_by="test_a_block_may_take_and_return_anything",
        says="taken apart",
        edits=(
            (
                CALL,
                "        output = checkpoint(\n"
                "            partial(self.forward, **kwargs), *args,\n"
                "            use_reentrant=False, context_fn=self._contexts,\n"
                "        )\n"
                "        return output[0] if isinstance(output, tuple) else output\n",
            ),
        ),
    ),
    Wrong(
        name="never_asks_for_training",
        belief="A backward pass is a backward pass, in blocks too.",
        caught_by="test_changes_nothing_at_other_times[eval-recompute_all]",
        says="own training mode is not asked",
        edits=((TRAINING, ""),),
    ),
    Wrong(
        name="asks_the_model_for_its_mode",
        belief="If the model trains, its blocks do.",
        caught_by="test_changes_nothing_at_other_times[block_in_eval-recompute_all]",
        says="own training mode is not asked",
        edits=(
            (
                "_Checkpointed(block, block.forward, keep)\n",
                "_Checkpointed(block, block.forward, keep)\n        block.forward.model = model\n",
            ),
            ("        if not self.block.training:\n", "        if not self.model.training:\n"),
        ),
    ),
    Wrong(
        name="blocks_within_blocks",
        belief="model.modules() lists the blocks.",
        caught_by="test_only_outermost_blocks_are_checkpointed",
        says="blocks inside a block are counted",
        edits=(
            (
                BLOCKS,
                "    blocks = [m for m in model.modules() if isinstance(m, block_type)]\n",
            ),
        ),
    ),
    Wrong(
        name="innermost_blocks",
        belief="The smaller the block, the less is recomputed at once.",
        caught_by="test_only_outermost_blocks_are_checkpointed",
        says="blocks inside a block are checkpointed too",
        edits=(
            (
                "    for block in blocks:\n        # On",
                "    inner = [m for b in blocks for m in b.modules() if isinstance(m, block_type)]\n"
                "    for block in inner:\n        # On",
            ),
        ),
    ),
    Wrong(
        name="keep_unread",
        belief="Full recomputation is selective enough.",
        caught_by="test_selective_recomputation_runs_no_matrix_product_again",
        says="keep is not heeded",
        edits=(("        if self.keep:\n", "        if self.keep is None:\n"),),
    ),
    Wrong(
        name="nothing_without_keep",
        belief="Without keep there is nothing to choose, so all is held.",
        caught_by="test_selective_recomputation_runs_no_matrix_product_again",
        says="nothing is recomputed",
        edits=(
            (
                "        if not self.block.training:\n",
                "        if not (self.block.training and self.keep):\n",
            ),
        ),
    ),
    Wrong(
        name="dear_whatever_is_given",
        belief="DEAR is what keep is for.",
        caught_by="test_keeps_the_results_of_the_given_operations_and_of_no_others[gelu]",
        says="keep is not what decides",
        edits=(
            (
                "create_selective_checkpoint_contexts(self.keep)",
                "create_selective_checkpoint_contexts(list(DEAR))",
            ),
        ),
    ),
    Wrong(
        name="keeps_dear_besides",
        belief="What is dear is always kept.",
        caught_by="test_keeps_the_results_of_the_given_operations_and_of_no_others[matmuls]",
        says="keep is not what decides",
        edits=(
            (
                "create_selective_checkpoint_contexts(self.keep)",
                "create_selective_checkpoint_contexts([*self.keep, *DEAR])",
            ),
        ),
    ),
    Wrong(
        name="keeps_the_first_operation",
        belief="keep holds one operation.",
        caught_by="test_keeps_the_results_of_the_given_operations_and_of_no_others[matmuls]",
        says="keep is not what decides",
        edits=(
            (
                "create_selective_checkpoint_contexts(self.keep)",
                "create_selective_checkpoint_contexts([torch.ops.aten.gelu.default])",
            ),
        ),
    ),
    Wrong(
        name="a_set_where_a_list_is_asked",
        belief="create_selective_checkpoint_contexts takes any collection.",
        caught_by="test_keeps_the_results_of_the_given_operations_and_of_no_others",
        says="must be either a function or a list of ops",
        raises=TypeError,
        edits=(("block, forward, list(keep)", "block, forward, keep"),),
    ),
    Wrong(
        name="one_checkpoint_for_all_of_gpt2",
        belief="The model is the block.",
        caught_by="test_gpt2_and_vit_peak_at_one_input_a_block_and_one_inside",
        says="not checkpointed one by one",
        edits=(
            (
                "    for block in blocks:\n        # On",
                "    for block in [model]:\n        # On",
            ),
        ),
    ),
    Wrong(
        name="keeps_everything",
        belief="What is not recomputed costs nothing.",
        caught_by="test_selective_recomputation_holds_less_than_the_plain_model",
        says="more is kept than the results of the operations in keep",
        edits=(
            (
                "create_selective_checkpoint_contexts(self.keep)",
                "create_selective_checkpoint_contexts(lambda *_, **__: True)",
            ),
        ),
    ),
    Wrong(
        name="one_checkpoint_for_the_toy",
        belief="The model is the block.",
        caught_by="test_selective_recomputation_holds_less_than_the_plain_model",
        says="more than one block's inside",
        edits=(
            (
                "    for block in blocks:\n        # On",
                "    for block in [model]:\n        # On",
            ),
        ),
    ),
    Wrong(
        name="patches_the_class",
        belief="The class is where forward is.",
        caught_by="test_leaves_the_class_and_its_other_models_alone",
        says="replaced on the class",
        edits=(
            (
                PATCH,
                "        kind = type(block)\n"
                "        if 'plain' not in vars(kind):\n"
                "            kind.plain = kind.forward\n"
                "            kind.forward = lambda self, *args, **kwargs: _Checkpointed(\n"
                "                self, lambda *a, **k: kind.plain(self, *a, **k), keep\n"
                "            )(*args, **kwargs)\n",
            ),
        ),
    ),
    Wrong(
        name="wraps_the_blocks_of_others",
        belief="A wrapper module is the tidy way.",
        caught_by="test_leaves_the_class_and_its_other_models_alone",
        says="blocks are wrapped in other modules",
        edits=(
            (
                "    for block in blocks:\n        # On",
                "    for name, block in list(model.named_modules()):\n"
                "        if block in blocks:\n"
                "            parent = model.get_submodule(name.rpartition('.')[0])\n"
                "            wrapped = nn.Module()\n"
                "            wrapped.block = block\n"
                "            wrapped.forward = block.forward\n"
                "            setattr(parent, name.rpartition('.')[2], wrapped)\n"
                "    for block in blocks:\n        # On",
            ),
        ),
    ),
    Wrong(
        name="counts_places",
        belief="Every place in the model has a block of its own.",
        caught_by="test_a_block_in_several_places_is_one_block",
        says="places are counted",
        edits=((BLOCKS, "    blocks = list(_outermost(model, block_type))\n"),),
    ),
    Wrong(
        name="recomputes_with_hooks",
        belief="A module is called, not its forward.",
        caught_by="test_hooks_of_a_block_run_as_they_did",
        says="hooks and all",
        edits=(
            (
                PATCH,
                "        kind = type(block)\n"
                "        call = lambda self, *a, kind=kind, **k: checkpoint(\n"
                "            lambda *b, **c: kind.__call__(self, *b, **c), *a, use_reentrant=False, **k\n"
                "        ) if self.training else kind.__call__(self, *a, **k)\n"
                "        block.__class__ = type(kind.__name__, (kind,), {'__call__': call})\n",
            ),
        ),
    ),
    Wrong(
        name="loses_the_hooks",
        belief="Hooks of the old block are of no use to the new one.",
        caught_by="test_hooks_of_a_block_run_as_they_did",
        says="hooks are lost",
        edits=(
            (
                PATCH,
                PATCH
                + "        block._forward_hooks.clear()\n        block._forward_pre_hooks.clear()\n",
            ),
        ),
    ),
    Wrong(
        name="a_closure_for_forward",
        belief="deepcopy copies a function with what it holds.",
        caught_by="test_a_deep_copy_checkpoints_its_own_blocks",
        says="a closure",
        edits=(
            (
                PATCH,
                "        patched = _Checkpointed(block, block.forward, keep)\n"
                "        block.forward = lambda *args, patched=patched, **kwargs: patched(*args, **kwargs)\n",
            ),
        ),
    ),
    Wrong(
        name="half_a_closure",
        belief="If the object is copied, so is the function that it was given.",
        caught_by="test_a_deep_copy_checkpoints_its_own_blocks",
        says="a closure",
        edits=(
            (
                PATCH,
                "        plain = block.forward\n"
                "        block.forward = _Checkpointed(block, lambda *a, f=plain, **k: f(*a, **k), keep)\n",
            ),
        ),
    ),
    Wrong(
        name="contexts_made_once",
        belief="One pair of contexts serves a block for good.",
        caught_by="test_calls_of_a_block_do_not_share_what_they_keep[keep_dear]",
        says="Trying to backward an extra time",
        raises=RuntimeError,
        edits=(
            (
                "        self.block, self.forward, self.keep = block, forward, list(keep)\n",
                "        self.block, self.forward, self.keep = block, forward, list(keep)\n"
                "        self.pair = create_selective_checkpoint_contexts(self.keep)\n",
            ),
            (SELECT, "        if self.keep:\n            keeping, replaying = self.pair\n"),
        ),
    ),
    Wrong(
        name="arguments_kept_on_the_block",
        belief="One call of a block is followed by its backward pass.",
        caught_by="test_calls_of_a_block_do_not_share_what_they_keep[recompute_all]",
        says="overwrite what the first one kept",
        edits=(
            (
                CALL,
                "        self.given = args[1:], kwargs\n"
                "        self.x = args[0]\n"
                "        return checkpoint(\n"
                "            lambda: self.forward(self.x[: len(self.x)], *self.given[0], **self.given[1]),\n"
                "            use_reentrant=False, context_fn=self._contexts,\n"
                "        )\n",
            ),
        ),
    ),
    Wrong(
        name="blocks_recompute_in_float32",
        belief="The recomputation belongs to the backward pass, which is outside autocast.",
        caught_by="test_blocks_recompute_in_the_precision_of_their_forward_pass[bf16-recompute_all]",
        says="runs without autocast",
        edits=(
            (
                "_both(_statistics_held(self.block), replaying)",
                "_both(torch.autocast('cpu', enabled=False), replaying)",
            ),
        ),
    ),
    Wrong(
        name="blocks_recompute_in_bfloat16",
        belief="Mixed precision is bfloat16.",
        caught_by="test_blocks_recompute_in_the_precision_of_their_forward_pass[fp16-recompute_all]",
        says="or with its default dtype",
        edits=(
            (
                "_both(_statistics_held(self.block), replaying)",
                "_both(torch.autocast('cpu', dtype=torch.bfloat16), replaying)",
            ),
        ),
    ),
    Wrong(
        name="batches_counted_twice",
        belief="A recomputation changes nothing.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="the recomputation updates the statistics again",
        edits=(("_both(_statistics_held(self.block), replaying)", "replaying"),),
    ),
    Wrong(
        name="batches_counted_in_the_backward_pass_only",
        belief="Once is once, in whichever pass.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="the forward pass does not update the statistics",
        edits=(
            (
                "return keeping, _both(_statistics_held(self.block), replaying)",
                "return _both(_statistics_held(self.block), keeping), replaying",
            ),
        ),
    ),
    Wrong(
        name="half_the_momentum_twice",
        belief="Two updates with 1 - sqrt(1 - momentum) are one with momentum.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="the forward pass does not update the statistics",
        edits=(
            (
                PATCH,
                PATCH + "        for norm in block.modules():\n"
                "            if isinstance(norm, _BatchNorm) and norm.momentum:\n"
                "                norm.momentum = 1 - (1 - norm.momentum) ** 0.5\n",
            ),
            ("_both(_statistics_held(self.block), replaying)", "replaying"),
        ),
    ),
    Wrong(
        name="no_momentum_in_the_recomputation",
        belief="With momentum 0 nothing is updated.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="num_batches_tracked",
        edits=(
            (
                ENTER,
                "    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]\n"
                "    kept = [norm.momentum for norm in norms]\n"
                "    for norm in norms:\n"
                "        norm.momentum = 0.0\n",
            ),
            (
                HELD,
                "    try:\n"
                "        yield\n"
                "    finally:\n"
                "        for norm, momentum in zip(norms, kept, strict=True):\n"
                "            norm.momentum = momentum\n",
            ),
        ),
    ),
    Wrong(
        name="the_norm_in_eval_mode_for_the_recomputation",
        belief="In eval mode a norm updates nothing.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="a norm does something else in the recomputation",
        edits=(
            (
                ENTER,
                "    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]\n"
                "    kept = [norm.training for norm in norms]\n"
                "    for norm in norms:\n"
                "        norm.eval()\n",
            ),
            (
                HELD,
                "    try:\n"
                "        yield\n"
                "    finally:\n"
                "        for norm, training in zip(norms, kept, strict=True):\n"
                "            norm.train(training)\n",
            ),
        ),
    ),
    Wrong(
        name="the_norm_without_buffers_for_the_recomputation",
        belief="Without running statistics there is nothing to update.",
        caught_by="test_batch_normalisation_counts_each_batch_once[in_eval_mode-recompute_all]",
        says="the batch's in eval mode",
        edits=(
            (
                "            setattr(norm, name, buffer.clone())\n",
                "            setattr(norm, name, None)\n",
            ),
        ),
    ),
    Wrong(
        name="tracking_switched_off",
        belief="Without track_running_stats nothing is updated, and nothing else changes.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="A different number of tensors was saved",
        edits=(
            (
                ENTER,
                "    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]\n"
                "    kept = [norm.track_running_stats for norm in norms]\n"
                "    for norm in norms:\n"
                "        norm.track_running_stats = False\n",
            ),
            (
                HELD,
                "    try:\n"
                "        yield\n"
                "    finally:\n"
                "        for norm, tracked in zip(norms, kept, strict=True):\n"
                "            norm.track_running_stats = tracked\n",
            ),
        ),
    ),
    Wrong(
        name="statistics_put_back_if_all_goes_well",
        belief="What follows yield runs.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="leaves changed ones behind",
        edits=(
            (
                HELD,
                "    yield\n"
                "    for norm, buffers in zip(norms, kept, strict=True):\n"
                "        for name, buffer in buffers.items():\n"
                "            setattr(norm, name, buffer)\n",
            ),
        ),
    ),
    Wrong(
        name="batches_forgotten",
        belief="Running statistics are a mean and a variance.",
        caught_by="test_batch_normalisation_counts_each_batch_once[cumulative-recompute_all]",
        says="num_batches_tracked",
        edits=(
            (
                "    kept = [dict(norm.named_buffers()) for norm in norms]\n",
                "    kept = [\n"
                "        {n: b for n, b in norm.named_buffers() if n.startswith('running')}\n"
                "        for norm in norms\n"
                "    ]\n",
            ),
        ),
    ),
    Wrong(
        name="one_kind_of_norm",
        belief="Batch normalisation is nn.BatchNorm1d.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-recompute_all]",
        says="0.norm2.0.running_mean",
        edits=(("if isinstance(module, _BatchNorm)]", "if isinstance(module, nn.BatchNorm1d)]"),),
    ),
    Wrong(
        name="every_norm_has_statistics",
        belief="running_mean is a tensor.",
        caught_by="test_batch_normalisation_counts_each_batch_once[untracked-recompute_all]",
        says="NoneType",
        raises=AttributeError,
        edits=(
            (
                "    kept = [dict(norm.named_buffers()) for norm in norms]\n",
                "    kept = [\n"
                "        {n: getattr(norm, n) for n in ('running_mean', 'running_var', 'num_batches_tracked')}\n"
                "        for norm in norms\n"
                "    ]\n",
            ),
        ),
    ),
    Wrong(
        name="statistics_inside_the_selection",
        belief="The order of two contexts does not matter.",
        caught_by="test_batch_normalisation_counts_each_batch_once[moving_average-keep_dear]",
        says="encountered during backward but not found in storage",
        raises=RuntimeError,
        edits=(
            (
                "_both(_statistics_held(self.block), replaying)",
                "_both(replaying, _statistics_held(self.block))",
            ),
        ),
    ),
    Wrong(
        name="twice_is_twice",
        belief="Nobody calls this twice.",
        caught_by="test_refuses_a_second_call_and_changes_nothing[all]",
        says="not checked",
        edits=((TWICE, ""),),
    ),
    Wrong(
        name="refuses_if_all_are_done",
        belief="One that is done is no harm.",
        caught_by="test_refuses_a_second_call_and_changes_nothing[one_block]",
        says="not checked",
        edits=(("    if any(isinstance(vars(block)", "    if all(isinstance(vars(block)"),),
    ),
    Wrong(
        name="refuses_on_the_way",
        belief="The check belongs where the block is changed.",
        caught_by="test_refuses_a_second_call_and_changes_nothing[one_block]",
        says="before the others have been looked at",
        edits=(
            (TWICE, ""),
            (
                PATCH,
                "        if isinstance(vars(block).get('forward'), _Checkpointed):\n"
                "            raise ValueError('checkpointed already')\n" + PATCH,
            ),
        ),
    ),
    Wrong(
        name="skips_what_is_done",
        belief="A second call has less to do.",
        caught_by="test_refuses_a_second_call_and_changes_nothing[one_block]",
        says="not checked",
        edits=(
            (TWICE, ""),
            (
                PATCH,
                "        if isinstance(vars(block).get('forward'), _Checkpointed):\n"
                "            continue\n" + PATCH,
            ),
        ),
    ),
    Wrong(
        name="no_blocks_no_work",
        belief="0 says it all.",
        caught_by="test_refuses_a_model_without_such_blocks",
        says="not checked",
        edits=(
            (
                "    if not blocks:\n"
                '        raise ValueError(f"no {block_type.__name__} in this {type(model).__name__}")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="does_not_say_which_class",
        belief="An error is an error.",
        caught_by="test_refuses_a_model_without_such_blocks",
        says="does not say which value was wrong",
        edits=(("no {block_type.__name__} in this", "no such block in this"),),
    ),
    Wrong(
        name="isinstance_checks_the_class",
        belief="isinstance() raises TypeError by itself.",
        caught_by="test_refuses_what_is_no_class_of_modules[a_name]",
        says="does not say which value was wrong",
        edits=(
            (
                "    if not (isinstance(block_type, type) and issubclass(block_type, nn.Module)):\n"
                '        raise TypeError(f"block_type must be a class of modules, not {block_type!r}")\n',
                "",
            ),
        ),
    ),
    Wrong(
        name="any_class_will_do",
        belief="A class is a class.",
        caught_by="test_refuses_what_is_no_class_of_modules[no_module]",
        says="before it is used",
        edits=(
            (
                "(isinstance(block_type, type) and issubclass(block_type, nn.Module))",
                "isinstance(block_type, type)",
            ),
        ),
    ),
    Wrong(
        name="keep_of_anything",
        belief="torch checks the operations.",
        caught_by="test_refuses_to_keep_what_is_no_overload_and_changes_nothing",
        says="not checked",
        edits=((KEPT, ""),),
    ),
    Wrong(
        name="looks_at_keep_too_late",
        belief="keep is checked where it is used.",
        caught_by="test_refuses_to_keep_what_is_no_overload_and_changes_nothing",
        says="when the blocks have been changed already",
        edits=((KEPT, ""), ("    return len(blocks)\n", KEPT + "    return len(blocks)\n")),
    ),
    Wrong(
        name="looks_at_the_first_of_keep",
        belief="Where one is an overload, all are.",
        caught_by="test_refuses_to_keep_what_is_no_overload_and_changes_nothing",
        says="not checked",
        edits=(("    for op in keep:\n", "    for op in list(keep)[:1]:\n"),),
    ),
]
