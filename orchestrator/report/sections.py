"""What a report says, section by section, from a run's record."""

from functools import partial

from orchestrator.report.attribution import attributed, waterfall
from orchestrator.report.distributions import ratio_figure, staleness_figure
from orchestrator.report.drawing import bin_size
from orchestrator.report.findings import findings_section, gradloc_section
from orchestrator.report.page import Page, PageSection, Table, Tile
from orchestrator.report.record import RunRecord
from orchestrator.report.timeline import MOST_LINES, marks_of, marks_table, timeline
from orchestrator.report.work import endings, endings_figure, phases_figure
from orchestrator.run_dir.histograms import Histograms
from orchestrator.run_dir.layout import RunDir


def page_of(record: RunRecord) -> Page:
    """The page of a run."""
    return Page(
        name=record.path.name,
        what=_what(record),
        tiles=_tiles(record),
        notes=record.notes,
        rows=(
            (findings_section(record.rows),),
            (timeline_section(record),),
            (staleness_section(record.histograms, record.config.staleness.max_staleness), ratio_section(record)),
            (attribution_section(record), gradloc_section(RunDir(record.path).gradloc)),
            (phases_section(record), dispatches_section(record)),
        ),
    )


def _what(record: RunRecord) -> str:
    config = record.config
    model = getattr(config.model, "path", None)
    return (
        f"{config.engine.replicas} x {config.engine.type} and {config.trainer.ranks} trainer rank(s); model "
        f"{model or config.model.type}; environment {config.environment.type}; {config.run.batch_groups} groups of "
        f"{config.run.group_size} a step; at most {config.staleness.max_staleness} steps of staleness, policy "
        f"{config.staleness.policy}; consistency {config.consistency.mode}"
    )


def _tiles(record: RunRecord) -> tuple[Tile, ...]:
    rows, counts = record.rows, record.counts
    if not len(rows):
        return (Tile("steps", f"0 of {record.config.run.steps}"),)
    seconds = float(rows.column("step_seconds").sum())
    tokens = float((rows.column("tokens_per_second") * rows.column("step_seconds")).sum())
    return (
        Tile("steps", f"{rows.last_step} of {record.config.run.steps}"),
        Tile(
            "reward, first step and last ten",
            f"{rows.column('reward_mean')[0]:.3g} → {rows.column('reward_moving_10')[-1]:.3g}",
        ),
        Tile("trained tokens a second", f"{tokens / seconds:,.0f}"),
        Tile("time in steps", _duration(seconds)),
        Tile("oldest trained token, steps", f"{rows.column('token_staleness_max').max():.0f}"),
        Tile("engines busy", f"{rows.column('engine_busy')[-1]:.0%}"),
        Tile("trainer busy", f"{rows.column('trainer_busy')[-1]:.0%}"),
        *((Tile("dispatches", f"{counts.total:,}"),) if counts is not None else ()),
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def timeline_section(record: RunRecord) -> PageSection:
    """The four curves with their marks."""
    size = bin_size(len(record.rows))
    marks = marks_of(record)
    shared = f" A point stands for {size} steps: their mean, and for the gradient norm their largest."
    crowded = f" Only the first {MOST_LINES} events are drawn through the curves."
    intro = (
        "One curve a layer of diagnosis, the bold one first: look from top to bottom, since what is above may cause "
        "what is below. Ticks: a version reached the engines. Diamonds and dotted lines: events, in the colour of "
        f"their layer.{_scores_note(record)}{shared if size > 1 else ''}{crowded if len(marks) > MOST_LINES else ''}"
    )
    figures, table = (timeline(record),), marks_table(marks)
    return PageSection(key="timeline", title="Timeline", intro=intro, figures=figures, table=table)


def _scores_note(record: RunRecord) -> str:
    """How to read scores of evaluations, where there are any."""
    prints = {event.fields.get("fingerprint") for event in record.events_of("evaluation")}
    note = " Black marks: scores of evaluations, at the version scored." if prints else ""
    if len(prints) > 1:
        apart = "each with its own marks and line: their scores do not compare."
        note += f" {len(prints)} configurations were in force, {apart}"
    return note


def staleness_section(histograms: Histograms, max_staleness: int) -> PageSection:
    """How old tokens were."""
    said = partial(PageSection, key="staleness", title="Staleness")
    figure = staleness_figure(histograms, max_staleness)
    if figure is None:
        return said(intro="No trained token was counted: there is nothing in histograms/ yet.")
    intro = (
        "Steps between the version that sampled a token and the trainer's when it trained on it. The limit of this run "
        f"is {max_staleness}."
    )
    return said(intro=intro, figures=(figure,))


def ratio_section(record: RunRecord) -> PageSection:
    """How far importance ratios are from 1, and whose doing that is."""
    said = partial(PageSection, key="ratios", title="Importance ratios")
    figure = ratio_figure(record.histograms)
    if figure is None:
        return said(intro="No ratio was counted: there is nothing in histograms/ yet.")
    intro = (
        "Share of tokens by trainer probability over engine probability, on a logarithmic axis: a healthy run is a "
        "narrow peak at 1."
    )
    if record.config.consistency.mode != "gate":
        intro += " Only mode gate separates staleness from the engine; this run shows the total."
    return said(intro=intro, figures=(figure,))


def attribution_section(record: RunRecord) -> PageSection:
    """Why engine and trainer differ."""
    said = partial(PageSection, key="attribution", title="Attribution of the engine's gap")
    findings = record.events_of("consistency_finding")
    if found := attributed(findings):
        worst = "; ".join(f"replica {each.replica}, {each.policy}: {each.gap:.3g} nats" for each in found)
        intro = (
            "For each replica, the audit whose gap was furthest beyond its limits, taken apart by counterfactual "
            f"recomputation ({worst})."
        )
        return said(intro=intro, figures=tuple(waterfall(each) for each in found))
    if findings:
        causes = ", ".join(sorted({str(event.fields.get("cause")) for event in findings}))
        return said(intro=f"{len(findings)} findings without a gap to take apart; causes named: {causes}.")
    if record.config.consistency.mode == "off":
        return said(intro="The consistency service was off: nothing was recomputed, so nothing can be said.")
    audited = record.rows.column("consistency_audited_groups")[-1] if len(record.rows) else 0
    return said(intro=f"{audited:.0f} groups were audited, and no gap was beyond its limits: nothing to take apart.")


def phases_section(record: RunRecord) -> PageSection:
    """Where time goes."""
    said = partial(PageSection, key="phases", title="Phases of a step")
    figure = phases_figure(record.rows)
    if figure is None:
        return said(intro="No step is on disk yet.")
    rows = record.rows
    share = float(rows.column("step_wait_seconds").sum() / rows.column("step_seconds").sum())
    intro = (
        f"The trainer waited for a batch in {share:.0%} of the time: much of it means that engines or rewards are the "
        "bottleneck."
    )
    return said(intro=intro, figures=(figure,))


def dispatches_section(record: RunRecord) -> PageSection:
    """What became of every attempt."""
    said = partial(PageSection, key="dispatches", title="Accounting of dispatches")
    if record.counts is None:
        return said(intro="The store of this run cannot be read.")
    found = endings(record.counts)
    total = record.counts.total
    intro = f"{total:,} dispatches = {' + '.join(f'{each.groups:,} {each.name}' for each in found)}. Each ends once."
    rows = [(each.name, f"{each.groups:,}", f"{each.groups / total:.1%}" if total else "") for each in found]
    return said(intro=intro, figures=(endings_figure(found),), table=Table(("ending", "groups", "share"), rows))
