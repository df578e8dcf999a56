"""Latency results as a text table."""

from typing import Any


def table(found: dict[str, Any]) -> str:
    """The results of `measure` as lines of text."""
    rows = [(f"decoding step, batch {batch}", f"{ms:.2f} ms") for batch, ms in found["decode_ms"].items()]
    rows += [(f"decoding step, context {size}", f"{ms:.2f} ms") for size, ms in found["decode_ms_by_context"].items()]
    rows.append(("one prompt", f"{found['prefill_ms']:.1f} ms"))
    rows.append(("prompts at once", f"{found['prefill_tok_s']:.0f} tokens/s"))
    if "mtp_tok_s" in found:
        simulated = found["simulated_acceptance"]
        kind = "" if simulated is None else f", SIMULATED acceptance of {simulated:g} tokens a step"
        rows.append(
            (
                f"one sequence, {found['mtp_depth']} drafts",
                f"{found['mtp_tok_s']:.0f} tokens/s at {found['mtp_tokens_a_step']:.2f} tokens a step{kind}",
            )
        )
    rows.append(("weights in memory to ready", f"{found['ready_s']:.1f} s"))
    rows.append(("cache", f"{found['kv_tokens']} tokens"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
