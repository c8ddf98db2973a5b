"""What the first thing that differs in a step can only mean, whatever a spec is about."""

from kit.laws.equal import same

NO_GRAPH = (
    "the output has no graph: a reentrant checkpoint needs an argument that requires a gradient"
)
STREAM = (
    "the stream is not put back to where it was just before the second run; or only where that run"
    " ends without an exception"
)
LAST_BLOCK = (
    "every block runs the last one: a function looks up the variable of a loop when it is late"
)
WAYS = "precisions and modes of all runs"


def _ways(seen):
    return ", ".join(" in ".join(way) for way in seen[WAYS])


def meaning(got, want):
    """In words, or None."""
    if {*want} - {*got} and {*got} - {*want}:
        return "names in the model are changed: a module is put around a block, or replaced"
    name = next((name for name in want if not same(got.get(name), want[name])), "")
    if name == "output" and [t.shape for t in got[name]] == [t.shape for t in want[name]]:
        return "the first run already draws or computes otherwise than a plain call"
    if name.startswith("requires_grad of the output") and not any(got[name]):
        return NO_GRAPH
    if name.startswith("numbers drawn after the backward pass"):
        return STREAM
    if name in ("backward pass", WAYS) and (others := {*got[WAYS]} - {*want[WAYS]}):
        return f"a block has run with {' in '.join(min(others))}; right: {_ways(want)}"
    if name == "backward pass" and "not found in storage" in str(got[name]):
        return (
            "the second run has an operation that the first had not, as where state is copied or"
            " put back inside of the context of `keep`"
        )
    if name.startswith("buffers that the backward pass replaced"):
        return "after the second run other tensors are there than before: copies, or what had gone"
    if name.startswith("runs in the backward pass"):
        if got[name] == [2 * count for count in want[name]] and any(got[name]):
            return "every block runs again twice: there is a checkpoint inside a checkpoint"
        if not any(got[name]):
            return "nothing runs again: the call is a plain one here"
        plain = [n for n, count in enumerate(got[name]) if count < want[name][n]]
        return f"block {plain[0]} does not run again: it is called plainly" if plain else None
    if name.startswith("runs in the forward pass"):
        *others, last = got[name]
        return LAST_BLOCK if others and not any(others) and last == sum(want[name]) else None
    return None
