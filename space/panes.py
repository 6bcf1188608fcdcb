"""A race as HTML: two panes and a line above them. Does not know: how a race is run (racing)."""

import html

from limits import short_length
from racing import LaneView, RaceView


PLAIN_NAME, LONGSPARK_NAME = "plain generate", "LongSpark"
ORIGINS = {
    "draft": "accepted draft",
    "target": "the target's own: correction or bonus",
    "first": "the target's own: from the prefill",
}


def waiting_panes() -> tuple[str, str, str]:
    """Summary and panes before the first race."""
    panes = [
        f"<section class='ls-pane'><header><h3>{name}</h3></header><p class='ls-empty'>The answer appears here.</p></section>"
        for name in (PLAIN_NAME, LONGSPARK_NAME)
    ]
    return (summary_html(None), *panes)


def summary_html(view: RaceView | None, note: str = "") -> str:
    """Speedup, τ, state and whether both answers are the same."""
    if view is None:
        return f"<div class='ls-summary' role='status'>{note or 'Both lanes run on the same device, in turn.'}</div>"
    speedup = "–" if view.speedup is None else f"{view.speedup:.2f} ×"
    tau = "–" if not view.longspark.rounds else f"{view.longspark.tau:.2f}"
    figures = [
        ("speedup", "speedup", speedup, "decoding, LongSpark over plain"),
        ("τ, tokens a round", "tau", tau, "mean tokens committed per verification"),
        ("identical", "identical", _identical(view), "same tokens in both panes, T = 0"),
    ]
    if view.state_bytes is not None:
        figures.append(("drafter state", "state", _mib(view.state_bytes), f"{view.state_bytes:,} bytes"))
    cells = "".join(
        f"<div><dt>{name}</dt><dd data-figure='{key}' title='{title}'>{value}</dd></div>"
        for name, key, value, title in figures
    )
    return f"<div class='ls-summary'><dl>{cells}</dl><p role='status'>{note or _how(view)}</p></div>"


def _identical(view: RaceView) -> str:
    if view.temperature > 0:
        return "– (sampled)"
    if view.identical is None:
        return "stopped" if view.finished else "…"
    return "yes" if view.identical else f"no, from token {view.first_difference + 1} on"


def _how(view: RaceView) -> str:
    prompt = f"Prompt: {view.prompt_tokens:,} tokens ({view.prompt_origin}). " if view.prompt_origin else ""
    if view.stopped:
        return f"{prompt}Stopped. What was generated until then stays."
    order = "plain began" if view.first == "plain" else "LongSpark began"
    how = f"{prompt}One device, in turn: the lane whose own clock is behind runs next ({order}); each clock runs in its own turns only."
    if view.identical is False:
        how += " " + _why_different(view.dtype)
    return how


def _why_different(dtype: str) -> str:
    tie = (
        "verifying several tokens at once rounds differently from decoding one, and a near-tie can fall the other way."
    )
    if dtype == "float32":
        return f"In float32 this is rare: {tie}"
    return f"In half precision ({dtype}) {tie}"


def pane_html(name: str, lane: LaneView, view: RaceView | None = None) -> str:
    """
    One generation.

    Args:
        name (`str`): Its heading.
        lane ([`LaneView`]): What to show.
        view ([`RaceView`], *optional*): With it, tokens are coloured and the drafter's figures are shown.
    """
    speed = "–" if lane.tokens_per_second is None else f"{lane.tokens_per_second:.1f}"
    prefill = "–" if not lane.prefill_seconds else f"{lane.prefill_seconds:.2f} s"
    head = (
        f"<header><h3>{name}</h3><p><b data-figure='speed'>{speed}</b> tokens/s · {len(lane.ids)} tokens · "
        f"{lane.seconds:.2f} s, {prefill} of it prefill</p></header>"
    )
    text = _coloured(lane) if view is not None else html.escape("".join(piece for piece, _ in lane.pieces))
    body = f"<div class='ls-text' tabindex='0' aria-label='{name}: answer'>{text or _phase(lane)}</div>"
    return f"<section class='ls-pane' data-phase='{lane.phase}'>{head}{body}{_drafting(lane, view) if view else ''}</section>"


def _phase(lane: LaneView) -> str:
    if lane.phase == "reading":
        return (
            f"<label>reading the prompt, layer {lane.layers_read + 1} of {lane.layers} "
            f"<progress value='{lane.layers_read}' max='{lane.layers}'></progress></label>"
        )
    return {"waiting": "waiting for its turn …", "stopped": "stopped"}.get(lane.phase, "")


def _coloured(lane: LaneView) -> str:
    return "".join(
        f"<span class='ls-{origin}' title='{ORIGINS[origin]}'>{html.escape(piece)}</span>"
        for piece, origin in lane.pieces
    )


def _drafting(lane: LaneView, view: RaceView) -> str:
    legend = (
        "<p class='ls-legend'><span class='ls-draft'>accepted draft</span> "
        "<span class='ls-target'>the target's own: correction or bonus</span></p>"
    )
    bars = "".join(
        f"<li><span>{position}</span><span class='ls-bar'><i style='width:{100 * kept / max(lane.rounds, 1):.0f}%'></i></span>"
        f"<span>{100 * kept / max(lane.rounds, 1):.0f}%</span></li>"
        for position, kept in enumerate(lane.accepted_by_position[: view.block_size], 1)
    )
    rounds = f"τ = <b data-figure='lane-tau'>{lane.tau:.2f}</b> after {lane.rounds} rounds"
    times = ""
    if view.state_bytes is not None:
        draft = "no draft" if view.draft_ms is None else f"draft {view.draft_ms:.1f} ms"
        verification = "none" if view.verify_ms is None else f"{view.verify_ms:.1f} ms"
        times = (
            f"<p>A round: {draft}, verification {verification}. Drafter state {_mib(view.state_bytes)}"
            f" (<span data-figure='state-bytes' data-value='{view.state_bytes}'>{view.state_bytes:,}</span> bytes), target's K/V cache {_mib(view.target_bytes)}"
            f" at {short_length(view.context)} tokens.</p>"
        )
    return (
        f"{legend}<div class='ls-drafting'><div><p>{rounds}</p>{_sparkline(lane.tau_by_round, view.block_size + 1)}</div>"
        f"<div><p>kept at position</p><ol class='ls-bars' aria-label='share of rounds that kept the draft at each position'>"
        f"{bars}</ol></div></div>{times}"
    )


def _sparkline(values: list[float], top: int) -> str:
    if len(values) < 2:
        return ""
    step = max(len(values) // 120, 1)
    kept = values[::step]
    points = " ".join(f"{160 * i / (len(kept) - 1):.1f},{40 - 40 * value / top:.1f}" for i, value in enumerate(kept))
    return (
        f"<svg class='ls-spark' viewBox='0 -2 160 44' role='img' aria-label='τ after each round, now {values[-1]:.2f}, axis 0 to {top}'>"
        f"<line x1='0' y1='40' x2='160' y2='40'/><polyline points='{points}'/></svg>"
    )


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"
