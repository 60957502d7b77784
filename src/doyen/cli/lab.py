"""`doyen lab …`: run simulated clusters with `doyen.lab`, and print the results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doyen.cli._output import (
    Console,
    Exit,
    Table,
    add_actions,
    add_option,
    console,
    follow,
    print_json,
    seconds,
)
from doyen.errors import ConfigError

if TYPE_CHECKING:
    from doyen.lab.outcome import RunOutcome
    from doyen.lab.plan import Plan
    from doyen.lab.runner import Comparison, FoundFailure, HuntProgress

MANUAL = """\
Runs the same protocols, nodes, sessions and elections as on real machines in a simulation, where
time, network, disks, clocks and crashes follow from one seed. The same seed gives the same run,
event by event. After every event the lab checks that there is one leader at a time and that
committed entries never change and are on enough disks; with whole nodes also that terms do not
overlap and tokens increase. At the end it checks that clients saw one consistent history, that no
acknowledged write is lost, and that a leader is elected once all faults are healed.

If a run violates an invariant, it is reduced to the few faults that matter and described step by
step; the file that is written replays it, and a page beside it (.html) shows it. A hunt ends when
its time is over or after three failed runs; when interrupted, it prints and writes what it has
found so far.

With --html a run becomes a page: one file for a browser, in which one can step through the run, see
every message, and read why a vote was refused. `doyen lab play` serves such pages on this machine
and lets you change what happens: cut a link, kill a server, drop a message.

exit codes:
  0    all invariants held
  1    an invariant was violated; the run is described and written to a file
  others as for every command: see doyen --help

examples:
  doyen lab run --protocol raft --nodes 5 --seed 7 --faults all --for 1h
  doyen lab hunt --protocols all --limit 10m
  doyen lab compare --nodes 5 --seeds 20 --plot compare.svg
  doyen lab scale --most 10000 --plot scale.svg
  doyen lab scenario
  doyen lab scenario paused-leader
  doyen lab replay lab-raft-4711.json
  doyen lab scenario vote-without-log --html lesson.html
  doyen lab play
"""


def duration(text: str) -> float:
    """The argparse type of a duration of more than 0."""
    value = seconds(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 90s, 10m or 1h")
    return value


def number(text: str) -> int:
    """The argparse type of a number of at least 1.

    >>> number("5")
    5
    """
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def configure(parser: argparse.ArgumentParser) -> None:
    action = add_actions(parser)
    one = action("run", "run one seed")
    add_option(one, "--protocol NAME", "the protocol", "raft")
    add_option(one, "--seed N", "the seed", "0", type=int)
    add_option(one, "--tell", "print what happened, one line per event")
    add_option(one, "--save FILE", "write the run to this file (default: only if it fails)")
    many = action("hunt", "run seed after seed, on all CPUs, and report violations")
    add_option(many, "--protocols NAME,…", "the protocols, or all", "raft")
    add_option(many, "--limit TIME", "the time limit", "60s", type=duration)
    processes = "the number of processes (default: the number of CPUs)"
    add_option(many, "--jobs N", processes, str(os.cpu_count() or 1), type=number)
    add_option(many, "--first SEED", "the first seed", "0", type=int)
    add_option(many, "--out DIRECTORY", "the directory for failed runs (default: here)", ".")
    for each in (one, many):
        each.add_argument(
            "--world",
            choices=("cores", "quorum"),
            default="cores",
            help="protocol cores only, or whole nodes with candidates (default: cores)",
        )
    side = action("compare", "run all protocols with the same faults, and compare them")
    add_option(side, "--protocols NAME,…", "the protocols", "all")
    add_option(side, "--seeds N", "the number of seeds", "10", type=number)
    for each in (one, side):
        add_option(each, "--nodes N", "the number of nodes", "5", type=number)
    for each in (one, many, side):
        kinds = "kinds, or none, or a fault sequence: seesaw, remnant, rivals"
        add_option(each, "--faults KIND,…", kinds, "all")
        lasts = "how long faults are injected, in virtual time"
        add_option(each, "--for TIME", lasts, "20s", dest="for_s", type=duration)
    cost = action("scale", "measure the cost of an election with 10 to 100,000 candidates")
    add_option(cost, "--most N", "the largest number of candidates", "1000", type=number)
    for each in (side, cost):
        chart = "draw a chart: .svg, or .png with matplotlib (default: none)"
        add_option(each, "--plot FILE", chart)
    scenario = action("scenario", "run a scenario of the documentation, with explanations")
    scenario.add_argument(
        "name", nargs="?", metavar="NAME", help="the scenario (default: list all)"
    )
    replay = action("replay", "repeat a run from a file")
    replay.add_argument("file", metavar="FILE", help="a file written by run or hunt")
    for each in (one, side, scenario, replay):
        add_option(each, "--html FILE", "write a page for the browser to this file")
    served = action("play", "serve pages in which you cut links, kill servers and drop messages")
    served.add_argument(
        "files", nargs="*", metavar="FILE", help="saved runs to begin with, besides the scenarios"
    )
    address = "the address to serve on, of this machine; port 0 is any"
    add_option(served, "--listen HOST:PORT", address, "127.0.0.1:7481")


def run(args: argparse.Namespace) -> int:
    try:
        import msgspec  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("the lab needs msgspec: pip install 'doyen[quorum]'") from error
    return _ACTIONS[args.action](args)


def _protocols(text: str) -> tuple[str, ...]:
    from doyen.lab.protocols import PROTOCOLS, known

    names = PROTOCOLS if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        known(name)
    return names


def _check_file(file: str | None) -> None:
    """Check before a long run that the file can probably be written."""
    if file and (Path(file).is_dir() or not Path(file).parent.is_dir()):
        raise ConfigError(f"{file!r} cannot be written: name a file in an existing directory")


def _check_plot(file: str | None) -> None:
    from doyen.lab import chart

    _check_file(file)
    if file:
        chart.check_format(Path(file))


def _check_page(file: str | None) -> None:
    from doyen.lab.pages.page import check_name

    _check_file(file)
    if file:
        check_name(Path(file))


def _write_page(path: Path, plan: Plan, command: str) -> None:
    """Run a plan once more, and write a page about it."""
    from doyen.lab.pages.film import record_run
    from doyen.lab.pages.page import write_page

    write_page(path, record_run(plan, command=command)[2])


def _run(args: argparse.Namespace) -> int:
    from doyen.lab import runner
    from doyen.lab.narration import make_world, narrate
    from doyen.lab.protocols import known

    known(args.protocol)
    _check_file(args.save)
    _check_page(args.html)
    plan = runner.plan_for(
        args.world,
        args.protocol,
        args.nodes,
        args.seed,
        kinds=runner.kinds_of(args.faults),
        for_s=args.for_s,
    )
    began = time.monotonic()
    outcome, narration = narrate(plan) if args.tell else (make_world(plan).run(), [])
    took_s = time.monotonic() - began
    out = console()
    if not args.json:
        for line in narration:
            out.print(line)
        _show(out, outcome, took_s)
    if outcome.ok:
        if args.save:
            runner.save(Path(args.save), outcome, narration)
        if args.html:
            saved = f"doyen lab replay {args.save}" if args.save else _command(outcome, args.faults)
            _write_page(Path(args.html), plan, saved)
        if args.json:
            _print_run(outcome, narration, took_s, args.save or None)
        elif args.html:
            out.print(f"the page is in {args.html}")
        return Exit.DONE
    found, code = _reduce(outcome)
    if args.save:
        file = Path(args.save)
        runner.save(file, found.outcome, found.narration)
    else:
        file = runner.keep(Path(), found.outcome, found.narration)
    page = _page_of(found, file, args.html)
    if args.json:
        _print_run(outcome, found.narration, took_s, str(file))
    else:
        _show_found(out, found, file, page)
    return code


def _command(outcome: RunOutcome, faults: str) -> str:
    """The command line that repeats a run."""
    plan = outcome.plan
    command = f"doyen lab run --protocol {plan.protocol} --nodes {plan.nodes} --seed {plan.seed}"
    more = "" if plan.world == "cores" else f" --world {plan.world}"
    return f"{command} --faults {faults} --for {plan.for_s:g}s{more}"


def _page_of(found: FoundFailure, file: Path, page: str | None = None) -> Path | None:
    """Write a page about a failed run, by default beside its file. None if it was not reduced."""
    path = Path(page) if page else file.with_suffix(".html") if found.narration else None
    if path is not None:
        _write_page(path, found.outcome.plan, f"doyen lab replay {file}")
    return path


def _reduce(outcome: RunOutcome) -> tuple[FoundFailure, Exit]:
    """Reduce a failed run, which takes hundreds of runs, unless interrupted."""
    from doyen.lab import runner

    try:
        return runner.reduce(outcome.plan), Exit.NO
    except KeyboardInterrupt:
        return runner.unreduced(outcome), Exit.INTERRUPTED


def _print_run(outcome: RunOutcome, narration: list[str], took_s: float, file: str | None) -> None:
    result = {**_as_dict(outcome), "took_s": round(took_s, 3), "file": file}
    print_json({**result, "story": narration} if narration else result)


def _as_dict(outcome: RunOutcome) -> dict[str, Any]:
    import msgspec

    fields = msgspec.to_builtins(outcome)
    plan = fields.pop("plan")
    kept = ("protocol", "nodes", "seed", "world", "for_s")
    return {**{name: plan[name] for name in kept}, "ok": outcome.ok, **fields}


def _show(out: Console, outcome: RunOutcome, took_s: float) -> None:
    plan, figures = outcome.plan, outcome.statistics
    out.print(
        f"{plan.protocol}, {plan.nodes} nodes, seed {plan.seed}: {figures.faults} faults in"
        f" {figures.virtual_s:,.0f} s of virtual time"
    )
    out.print(
        f"{outcome.events:,} events in {took_s:.1f} s ({outcome.events / max(took_s, 1e-9):,.0f}"
        f" per second, {figures.virtual_s / max(took_s, 1e-9):,.0f} times real time)"
    )
    out.print(
        f"{figures.leaders} leaders, {figures.commits:,} entries committed, {figures.writes:,}"
        f" writes and {figures.reads:,} reads answered, available"
        f" {figures.available_share:.1%} of the time"
    )
    out.print(f"trace {outcome.trace_hash}")
    if outcome.ok:
        out.print("all invariants held", style="green")
    for violation in outcome.violations:
        out.print(
            f"VIOLATED at {violation.at:g} s: {violation.kind}: {violation.text}", style="red"
        )


def _show_found(
    out: Console, found: FoundFailure, file: Path | None, page: Path | None = None
) -> None:
    plan = found.outcome.plan
    if found.narration:
        out.print(f"reduced to {len(plan.faults)} faults, {plan.nodes} nodes; what happened:")
        for line in found.narration:
            out.print(line)
    else:
        out.print(f"not reduced: {len(plan.faults)} faults, {plan.nodes} nodes")
        for violation in found.outcome.violations:
            out.print(f"{violation.kind}: {violation.text}")
    if file is not None:
        out.print(f"doyen lab replay {file}")
    if page is not None:
        out.print(f"the page is in {page}")


def _hunt(args: argparse.Namespace) -> int:
    from itertools import count

    from doyen.lab import runner

    shown = _Progress(runner.HuntProgress(), silent=args.json)
    kept: list[tuple[FoundFailure, Path | None, Path | None]] = []

    def keep(found: FoundFailure) -> None:
        """Write a failed run at once, because the hunt may be interrupted."""
        file = page = None
        try:
            file = runner.keep(Path(args.out), found.outcome, found.narration)
            page = _page_of(found, file)
        except OSError as error:
            shown.warn(f"doyen: a failed run could not be written: {error}")
        kept.append((found, file, page))

    if not Path(args.out).is_dir():
        raise ConfigError(f"the directory {args.out!r} for failed runs does not exist")
    interrupted = 0
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        runner.hunt(
            _protocols(args.protocols),
            count(args.first),
            jobs=args.jobs,
            limit_s=args.limit,
            faults=args.faults,
            for_s=args.for_s,
            world=args.world,
            progress=shown,
            on_failure=keep,
        )
    except KeyboardInterrupt as error:
        interrupted = error.args[0] if error.args else signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    shown.end()
    if args.json:
        _print_hunt(shown.latest, kept, bool(interrupted))
    else:
        out = console()
        out.print(_progress_line(shown.latest) + (", interrupted" if interrupted else ""))
        for found, file, page in kept:
            out.print(
                f"{found.outcome.plan.protocol}, seed {found.outcome.plan.seed}:", style="red"
            )
            _show_found(out, found, file, page)
        if not kept:
            out.print("no violation was found", style="green")
    if interrupted:
        return 128 + interrupted
    return Exit.NO if kept else Exit.DONE


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _print_hunt(
    progress: HuntProgress,
    kept: list[tuple[FoundFailure, Path | None, Path | None]],
    interrupted: bool,
) -> None:
    import msgspec

    failures = [
        {
            **_as_dict(found.outcome),
            "story": found.narration,
            "file": file and str(file),
            "page": page and str(page),
        }
        for found, file, page in kept
    ]
    result = {**msgspec.to_builtins(progress), "interrupted": interrupted, "failures": failures}
    print_json(result)


def _progress_line(progress: HuntProgress) -> str:
    rate = progress.events / max(progress.elapsed_s, 1e-9)
    return (
        f"{progress.elapsed_s:,.0f} s: {progress.seeds:,} seeds, {progress.events:,} events"
        f" ({rate:,.0f} per second), {progress.virtual_s / 3600:,.1f} h of virtual time,"
        f" {progress.found} failed"
    )


class _Progress:
    """Shows progress: on a terminal one line that is overwritten, otherwise a line per minute."""

    def __init__(self, begun: HuntProgress, *, silent: bool) -> None:
        self.latest = begun
        self._silent = silent
        self._live = sys.stderr.isatty()
        self._printed_at = 0.0

    def __call__(self, progress: HuntProgress) -> None:
        self.latest = progress
        if self._silent:
            return
        if self._live:
            print(f"\r\x1b[K{_progress_line(progress)}", end="", file=sys.stderr, flush=True)
        elif progress.elapsed_s - self._printed_at >= 60:
            self._printed_at = progress.elapsed_s
            print(_progress_line(progress), file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live and not self._silent:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def warn(self, line: str) -> None:
        self.end()
        print(line, file=sys.stderr, flush=True)


def _compare(args: argparse.Namespace) -> int:
    from doyen.lab import runner
    from doyen.lab.chart import comparison_panels, write_chart

    _check_plot(args.plot)
    _check_page(args.html)
    runs = runner.run_protocols(
        _protocols(args.protocols),
        nodes=args.nodes,
        seeds=range(args.seeds),
        faults=args.faults,
        for_s=args.for_s,
    )
    rows = [runner.summarize(protocol, outcomes) for protocol, outcomes in runs.items()]
    if args.plot:
        write_chart(Path(args.plot), comparison_panels(rows))
    if args.html:
        from doyen.lab.pages.comparison import comparison_film
        from doyen.lab.pages.page import write_page

        write_page(Path(args.html), comparison_film(runs), name="comparison")
    if args.json:
        import msgspec

        print_json({"rows": msgspec.to_builtins(rows), "plot": args.plot})
    else:
        out = console()
        out.print(_compared(rows))
        count = f"{args.seeds} runs" if args.seeds > 1 else "one run"
        out.print(f"medians of {count}, with the same faults at the same times")
        if args.plot:
            out.print(f"the chart is in {args.plot}")
        if args.html:
            out.print(f"the page is in {args.html}")
    return Exit.NO if any(row.violations for row in rows) else Exit.DONE


def _compared(rows: list[Comparison]) -> Table:
    table = Table(
        [
            *("protocol", ">first leader s", ">healed s", ">leaders", ">available"),
            *(">messages/s", ">kB/s", ">messages/write", ">writes", ">lost or broken"),
        ]
    )
    for row in rows:
        table.rows.append(
            [
                row.protocol,
                f"{row.first_leader_s:.2f}",
                f"{row.healed_s:.2f}",
                f"{row.leaders:g}",
                f"{row.available_share:.1%}",
                f"{row.messages_per_s:,.0f}",
                f"{row.bytes_per_s / 1000:,.1f}",
                f"{row.messages_per_write:,.1f}",
                f"{row.writes:,}",
                str(row.violations),
            ]
        )
    return table


def _scale(args: argparse.Namespace) -> int:
    from doyen.lab.chart import write_chart
    from doyen.lab.scale import SIZES, measure, panels

    sizes = [size for size in SIZES if size <= args.most]
    if len(sizes) < 2:
        raise ConfigError(f"--most must be at least {SIZES[1]}; got {args.most}")
    _check_plot(args.plot)

    def progress(line: str) -> None:
        if not args.json:
            print(line, file=sys.stderr, flush=True)

    costs = measure(sizes, progress=progress)
    if args.plot:
        write_chart(Path(args.plot), panels(costs))
    if args.json:
        import msgspec

        print_json({"costs": msgspec.to_builtins(costs), "plot": args.plot})
        return Exit.DONE
    table = Table(["what", ">count", ">one way ms", ">messages", ">bytes", ">without a leader ms"])
    for cost in sorted(costs, key=lambda cost: (cost.what, cost.one_way_s, cost.count)):
        table.rows.append(
            [
                cost.what,
                f"{cost.count:,}",
                f"{cost.one_way_s * 1000:g}",
                f"{cost.messages:,}",
                f"{cost.bytes:,}",
                f"{cost.seconds * 1000:,.1f}",
            ]
        )
    console().print(table)
    return Exit.DONE


def _scenario(args: argparse.Namespace) -> int:
    from doyen.lab.scenarios import SCENARIOS, run_scenario

    out = console()
    if args.name is None:
        if args.html:
            raise ConfigError("name the scenario that the page is to show")
        if args.json:
            print_json({name: each.title for name, each in SCENARIOS.items()})
        else:
            table = Table(["scenario", "what it shows"])
            table.rows += [[name, each.title] for name, each in SCENARIOS.items()]
            out.print(table)
        return Exit.DONE
    if args.name not in SCENARIOS:
        raise ConfigError(f"unknown scenario {args.name!r}; known are {', '.join(SCENARIOS)}")
    if args.html:
        from doyen.lab.pages.film import record_scenario
        from doyen.lab.pages.page import write_page

        _check_page(args.html)
        played, film = record_scenario(args.name)
        write_page(Path(args.html), film)
    else:
        played = run_scenario(args.name)
    if args.json:
        print_json(played.as_dict())
    else:
        out.print(SCENARIOS[args.name].title, style="bold")
        out.print(f"({SCENARIOS[args.name].source})")
        for line in played.lines:
            out.print(line)
        for fact in played.facts:
            out.print(
                f"{'✓' if fact.held else '✗'} {fact.text}", style="green" if fact.held else "red"
            )
        if args.html:
            out.print(f"the page is in {args.html}")
    return Exit.DONE if played.ok else Exit.NO


def _replay(args: argparse.Namespace) -> int:
    from doyen.lab import runner

    path = Path(args.file)
    if not path.is_file():
        raise ConfigError(f"the file {path} does not exist")
    _check_page(args.html)
    outcome, narration, same = runner.replay(path)
    if args.html:
        _write_page(Path(args.html), outcome.plan, f"doyen lab replay {path}")
    if args.json:
        print_json({**_as_dict(outcome), "same": same, "story": narration})
    else:
        out = console()
        for line in narration:
            out.print(line)
        out.print(
            f"trace {outcome.trace_hash}"
            + ("" if same else ", which differs from the recorded run")
        )
        if not same:
            out.print("the code or the file has changed since the run was recorded", style="yellow")
        if outcome.ok:
            out.print("all invariants held", style="green")
        if args.html:
            out.print(f"the page is in {args.html}")
    return Exit.DONE if outcome.ok else Exit.NO


def _play(args: argparse.Namespace) -> int:
    from doyen.lab import runner
    from doyen.web.serving import listen, require_web

    require_web()
    runs = {}
    for file in args.files:
        if not Path(file).is_file():
            raise ConfigError(f"the file {file} does not exist")
        runs[file] = runner.read_file(Path(file)).plan
    listener = listen(args.listen)

    def ready() -> None:
        if args.json:
            print_json({"url": listener.url})
        else:
            console().print(f"the lab is at {listener.url}")

    from doyen.lab.pages.play import serve

    with listener.socket:
        return follow(serve(listener, runs, ready))


_ACTIONS = {
    "run": _run,
    "hunt": _hunt,
    "compare": _compare,
    "scale": _scale,
    "scenario": _scenario,
    "replay": _replay,
    "play": _play,
}
