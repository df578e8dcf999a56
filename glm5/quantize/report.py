"""The report of a run: a JSON file with every figure, and an HTML page that shows them and needs nothing beside it."""

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.config.tensors import tensor_specs
from glm5.quantize.job import Job
from glm5.quantize.measure import Quality, Written
from glm5.quantize.store import Store

JSON_NAME, HTML_NAME = "quantization.json", "quantization.html"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg{display:block;margin:.5rem 0}.note{color:#555}"
)


def document(job: Job, store: Store, quality: Quality | None, num_verified: int, host_bytes: int) -> dict[str, Any]:
    """All figures, as plain JSON types."""
    metrics = {layer_idx: entry["figures"] for layer_idx, entry in sorted(store.layers.items())}
    modules = {
        f"model.layers.{layer_idx}.{module}": errors
        for layer_idx, found in metrics.items()
        for module, errors in found.items()
        if isinstance(errors, dict) and "weight" in errors
    }
    return {
        "model": str(job.settings.model),
        "recipe": job.resolved.name,
        "target": job.resolved.target,
        "format": job.run.format.name,
        "notes": [*job.resolved.notes, *(job.remarks if quality else ())],
        "settings": job.settings.model_dump(mode="json"),
        "steps": job.resolved.recipe.model_dump(mode="json")["process"],
        "verified": num_verified,
        "host_bytes": host_bytes,
        "parts": parts(job, store),
        "quality": quality.to_dict() if quality else None,
        "modules": modules,
        "smoothing": {str(idx): found["smoothing"] for idx, found in metrics.items() if found.get("smoothing")},
        "tokens_per_expert": {
            str(idx): found["tokens_per_expert"] for idx, found in metrics.items() if "tokens_per_expert" in found
        },
    }


def parts(job: Job, store: Store) -> dict[str, dict[str, float]]:
    """Bytes and bits a weight by part of the model, scales included, as they are in the files."""
    part_of = {spec.name.removesuffix(".weight"): spec.part for spec in tensor_specs(job.cfg)}
    num_bytes: Counter[str] = Counter()
    for name, entry in Written(store.model).entries.items():
        module = name if name in part_of else name.rpartition(".")[0]
        num_bytes[part_of.get(module, "for drafts")] += entry.num_bytes
    weights: Counter[str] = Counter()
    for spec in tensor_specs(job.cfg):
        size = 1
        for length in spec.shape:
            size *= length
        weights[spec.part] += size
    return {
        part: {"bytes": number, "weights": weights[part], "bits": 8 * number / weights[part] if weights[part] else 0.0}
        for part, number in num_bytes.most_common()
    }


def write_report(directory: Path, found: Mapping[str, Any]) -> None:
    """Both files."""
    with atomic_write(directory / JSON_NAME) as file:
        json.dump(found, file, indent=2)
    with atomic_write(directory / HTML_NAME) as file:
        file.write(page(found))


def page(found: Mapping[str, Any]) -> str:
    """The HTML page."""
    model = Path(found["model"]).name
    body = [f"<h1>{_text(model)} &rarr; {_text(found['recipe'])}</h1>"]
    body.append(
        f"<p>Files for {_text(found['target'])} ({_text(found['format'])}); {found['verified']} modules and tensors "
        f"read back as they were meant; at most {found['host_bytes'] / 1e9:.2f} GB of host memory.</p>"
    )
    body += [f'<p class="note">{_text(note)}</p>' for note in found["notes"]]
    body += _quality(found["quality"])
    total = sum(part["bytes"] for part in found["parts"].values())
    rows = [
        (name, f"{part['bytes'] / 1e6:,.2f}", f"{100 * part['bytes'] / total:.1f} %", f"{part['bits']:.2f}")
        for name, part in found["parts"].items()
    ]
    body += ["<h2>Size</h2>", table(("part", "MB", "share", "bits a weight"), rows)]
    body += _modules(found["modules"])
    body += _smoothing(found["smoothing"])
    body += _experts(found["tokens_per_expert"])
    return styled(f"{model}: quantization", body)


def styled(title: str, body: Iterable[str]) -> str:
    """A whole page of parts in HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _quality(quality: Mapping[str, Any] | None) -> list[str]:
    if quality is None:
        return ['<p class="note">Nothing was measured on held-out text (--held-out-tokens 0).</p>']
    rows = [
        ("KL to the original", f"{quality['kl']:.5f} &plusmn; {quality['kl_error']:.5f}"),
        ("its median over positions", f"{quality['kl_median']:.5f}"),
        ("same most likely token", f"{100 * quality['top1']:.2f} %"),
        ("perplexity", f"{quality['perplexity']:.4f}"),
        ("perplexity of the original", f"{quality['perplexity_before']:.4f}"),
    ]
    shown = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
    return [
        f"<h2>Quality on {quality['num_tokens']:,} held-out tokens</h2><table>{shown}</table>",
        "<h3>Relative error of hidden states after each layer</h3>",
        bars([str(i) for i in range(len(quality["layers"]))], quality["layers"]),
    ]


def _modules(modules: Mapping[str, Mapping[str, float]]) -> list[str]:
    """By kind of module: median and worst; all of them are in the JSON file."""
    kinds: dict[str, list[tuple[float, float, str]]] = {}
    for name, errors in modules.items():
        kind = name.split(".", 3)[3]
        kinds.setdefault(kind, []).append((errors["weight"], errors.get("output", float("nan")), name))
    rows = []
    for kind, found in kinds.items():
        weights, outputs = sorted(w for w, _, _ in found), sorted(o for _, o, _ in found if o == o)
        worst = max(found, key=lambda each: each[1] if each[1] == each[1] else each[0])
        shown = (f"{outputs[len(outputs) // 2]:.4f}", f"{outputs[-1]:.4f}") if outputs else ("", "")
        rows.append((kind, str(len(found)), f"{weights[len(weights) // 2]:.4f}", *shown, worst[2].split(".")[2]))
    head = ("module", "layers", "weight error", "output error", "worst output", "in layer")
    names = list(modules)
    values = [errors.get("output", errors["weight"]) for errors in modules.values()]
    chart = bars(names, values, labels=False) if names else ""
    return ["<h2>Errors by module</h2>", table(head, rows), "<h3>Output error, all modules in order</h3>", chart]


def _smoothing(smoothing: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    rows = [
        (f"{layer}.{source}", *(f"{each[key]:.4f}" for key in ("alpha", "beta", "error_before", "error")))
        for layer, found in smoothing.items()
        for source, each in found.items()
    ]
    if not rows:
        return []
    return ["<h2>Smoothing</h2>", table(("source", "alpha", "beta", "error before", "after"), rows)]


def _experts(tokens: Mapping[str, Sequence[int]]) -> list[str]:
    found: list[str] = []
    for layer, counts in tokens.items():
        found.append(f"<h3>Layer {layer}: {min(counts)} to {max(counts)} tokens an expert</h3>")
        found.append(bars([str(i) for i in range(len(counts))], counts, labels=len(counts) <= 32))
    return ["<h2>Calibration tokens by expert</h2>", *found] if found else []


def bars(names: Sequence[str], values: Sequence[float], *, labels: bool = True, slanted: bool = False) -> str:
    """A bar chart as SVG; names appear below, slanted where they are long, or, without labels, when pointed at."""
    width, height, top = 900, 140, max([*values, 1e-30])
    each = width / max(1, len(values))
    drawn: list[str] = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        tall = height * value / top
        drawn.append(
            f'<rect x="{i * each:.2f}" y="{height - tall:.2f}" width="{max(each * 0.85, 0.5):.2f}" height="{tall:.2f}" '
            f'fill="#4472a8"><title>{_text(name)}: {value:.6g}</title></rect>'
        )
        if labels and (len(names) <= 40 or i % 10 == 0):
            x, y = (i + 0.4) * each, height + 14
            place = f'x="{x:.2f}" y="{y}" font-size="11" text-anchor="{"end" if slanted else "middle"}"'
            place += f' transform="rotate(-40 {x:.2f} {y})"' if slanted else ""
            drawn.append(f"<text {place}>{_text(name)}</text>")
    box = f"0 -16 {width} {height + (150 if slanted else 36)}"
    scale = f'<text x="0" y="-4" font-size="11">{top:.4g}</text>'
    return f'<svg viewBox="{box}" width="100%" role="img">{scale}{"".join(drawn)}</svg>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """As HTML."""
    cells = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{_text(name)}</th>" for name in head) + f"</tr>{cells}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
