"""Typed needles: a retrieval task on token ids, which a two-layer model learns in minutes on a CPU.

    0..63       filler                     64 + 8 c + v   value v of class c, hidden once each in the filler
    192 + c     "which value has c?"       the tail asks all classes in random order; the answer is the value's token

Chance is 1 in 8. Only answers count in the loss. (Models of this size do not learn key-value recall: training notes,
8.1.)
"""

from random import Random

NUM_FILLER, NUM_CLASSES, NUM_VALUES = 64, 16, 8
VOCAB_SIZE = NUM_FILLER + NUM_CLASSES * NUM_VALUES + NUM_CLASSES


def needles(rng: Random, seq_len: int) -> tuple[list[int], list[bool]]:
    """Token ids [seq_len], and which of them are answers."""
    body = seq_len - 2 * NUM_CLASSES
    if body < NUM_CLASSES:
        raise ValueError(f"{seq_len=} has no room for {NUM_CLASSES} needles and their questions")
    ids = rng.choices(range(NUM_FILLER), k=body)
    values = rng.choices(range(NUM_VALUES), k=NUM_CLASSES)
    tokens = [NUM_FILLER + NUM_VALUES * kind + value for kind, value in enumerate(values)]
    for place, token in zip(rng.sample(range(body), NUM_CLASSES), tokens, strict=True):
        ids[place] = token
    for kind in rng.sample(range(NUM_CLASSES), NUM_CLASSES):
        ids += [VOCAB_SIZE - NUM_CLASSES + kind, tokens[kind]]
    return ids, [i >= body and (i - body) % 2 == 1 for i in range(seq_len)]
