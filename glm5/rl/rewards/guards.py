"""Penalties from 0 to 1 of an answer: its length, what it repeats, and phrases that are there to please a judge.

    length       (tokens - a m) / (m - a m), m = max_tokens, a = length_from      DAPO, arXiv 2503.14476, equation 13
    repetition   (s - f) / (1 - f), s = 1 - distinct / all runs of `run_words` words, f = repetition_from
    phrases      a third for each phrase that occurs

Each is 0 below its first value, and at most 1.
"""

from glm5.config.rl_reward import GuardsSection

MOST_PHRASES = 3
"""From which on the penalty is 1."""


def penalties(cfg: GuardsSection, answer: str, num_tokens: int, max_tokens: int) -> dict[str, float]:
    """By the names above, unweighted. `num_tokens`: of the answer; `max_tokens`: the most that it may have."""
    free, text = cfg.length_from * max_tokens, answer.lower()
    found = {
        "length": (num_tokens - free) / (max_tokens - free),
        "repetition": (repeated(text, cfg.run_words) - cfg.repetition_from) / (1 - cfg.repetition_from),
        "phrases": sum(phrase in text for phrase in cfg.pleasing) / MOST_PHRASES,
    }
    return {name: min(1.0, max(0.0, value)) for name, value in found.items()}


def repeated(text: str, run_words: int) -> float:
    """The share of runs of so many words that came before in the text; 0 where it has no two runs."""
    words = text.split()
    runs = [tuple(words[i : i + run_words]) for i in range(len(words) - run_words + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
