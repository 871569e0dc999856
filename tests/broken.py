"""Documents that are nearly right, for files broken by chance."""

from hypothesis import strategies

NAMES = (
    "",
    ".",
    "a",
    "a/b",
    "../a",
    "/a",
    "a\0b",
    "a\n",
    "\ud83d",
    "x" * 300,
    "x/" * 1500 + "x",
)
NUMBERS = (0, -1, 10**400, "1e99999999", "1/1000000000")
DEEP = "[" * 100_000
SCALARS = (
    strategies.none() | strategies.booleans() | strategies.integers(-(2**70), 2**70) | strategies.floats()
    | strategies.text(max_size=8) | strategies.sampled_from(NAMES + NUMBERS)
)  # fmt: skip
JUNK = strategies.recursive(
    SCALARS,
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(strategies.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


@strategies.composite
def near(draw, document):
    """Return a document with one of its parts left out, replaced or added."""
    if not (document and isinstance(document, dict | list) and draw(strategies.integers(0, 3))):
        return draw(JUNK)
    is_object, copied = isinstance(document, dict), document.copy()
    change = draw(strategies.sampled_from(["replace", "replace", "leave out", "add"]))
    key = draw(strategies.sampled_from(sorted(document) if is_object else range(len(document))))
    if change == "replace":
        copied[key] = draw(near(document[key]))
    elif change == "leave out":
        del copied[key]
    elif is_object:
        copied[draw(strategies.text(max_size=3))] = draw(JUNK)
    return copied
