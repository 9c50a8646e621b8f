"""`elche run`: a script on several devices, one process each."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elche.cli.files import check_outputs
from elche.config import POLICIES
from elche.errors import ConfigError

if TYPE_CHECKING:
    from elche.runtime.process.launch_config import LaunchConfig, LaunchResult


def numbers(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[float, ...] | None:
    """Parses ``1,0.25``."""
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"expected numbers like 1,0.25, got {text!r}"
        ) from error
    if not all(0 < number < float("inf") for number in found):
        raise click.BadParameter(f"expected positive numbers, got {text!r}")
    return found


def names(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, ...] | None:
    """Parses ``cuda:0,cpu``; strips blanks around names."""
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise click.BadParameter(f"expected names with commas between, got {text!r}")
    return found


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options for the number of ranks and their devices."""
    for option in (
        click.option(
            "--speeds",
            callback=numbers,
            help="Emulated CPU devices of these relative speeds, such as 1,0.25.",
        ),
        click.option(
            "--devices", callback=names, help="A device per rank, such as cuda:0,cpu."
        ),
        click.option("--nproc", type=int, help="Ranks; default: one per accelerator."),
    ):
        command = option(command)
    return command


# Options after SCRIPT belong to the script.
@click.command(context_settings={"allow_interspersed_args": False})
@rank_options
@click.option(
    "--ms-per-sample",
    type=float,
    help="Time per sample of an emulated device of speed 1; default: 1.25.",
)
@click.option(
    "--fixed-ms",
    type=float,
    help="Time per batch of an emulated device beside its samples'; default: 0.",
)
@click.option(
    "--policy", type=click.Choice(POLICIES), help="Policy where the script names none."
)
@click.option(
    "--story",
    envvar="ELCHE_STORY",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the event log (the last 50000 messages and decisions), written when "
    "the run ends, however it ends.",
)
@click.option(
    "--checkpoint-dir",
    envvar="ELCHE_CHECKPOINT_DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for checkpoints of loops over elche.epochs().",
)
@click.option(
    "--checkpoint-every",
    "every_s",
    type=float,
    metavar="SECONDS",
    help="Time between two checkpoints, inside epochs too.",
)
@click.option(
    "--keep",
    type=int,
    default=2,
    show_default=True,
    help="Complete checkpoints to keep, the newest.",
)
@click.option(
    "--resume", is_flag=True, help="Resume from the newest checkpoint of the folder."
)
@click.option(
    "--max-restarts",
    type=int,
    default=0,
    show_default=True,
    help="Restart all ranks from the newest checkpoint after a death, at most this "
    "often.",
)
@click.option(
    "--rejoin",
    type=int,
    default=0,
    show_default=True,
    help="Replace at most this many dead ranks while the others continue; each new "
    "rank joins the run in progress.",
)
@click.option(
    "--min-ranks",
    type=click.IntRange(min=1),
    help="With --rejoin: while fewer ranks live, the run pauses until others join.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the timeline of all ranks (Chrome trace, which ui.perfetto.dev"
    " opens), written when the run ends, however it ends.",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the run's event file (events.jsonl), written while it runs.",
)
@click.option(
    "--page",
    is_flag=True,
    help="Show the run in a browser, and print the page's address; without --events "
    "its folder is a new one in elche_runs.",
)
@click.option(
    "--page-at",
    metavar="HOST:PORT",
    help="Address of the --page; default: a free port of 127.0.0.1.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the run's report (*.html or *.png), written when it ends.",
)
@click.option(
    "--quiet",
    is_flag=True,
    help="Hide progress: the view on a terminal, elsewhere a line every few minutes.",
)
@click.option(
    "-m", "--module", is_flag=True, help="SCRIPT names a module, as for python -m."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], module: bool, **options: Any) -> None:
    """Run SCRIPT on several devices, one process each."""
    from elche.monitor.page.beside import new_folder, page_beside
    from elche.monitor.page.report_file import check_report, write_report
    from elche.runtime.process.restarts import RestartConfig, launch_with_restarts

    if not (module or Path(script).is_file()):
        raise click.BadParameter(f"File {script!r} does not exist", param_hint="SCRIPT")
    if problem := "" if module else _syntax_error(script):
        click.echo(problem, err=True, nl=False)
        sys.exit(1)
    at, is_shown = options.pop("page_at"), options.pop("page")
    is_shown, report = is_shown or at is not None, options.pop("report")
    if report:
        check_report(report)
    if (is_shown or report) and options["events"] is None:
        options["events"] = new_folder(script)
    words = ("-m", script, *arguments) if module else (script, *arguments)
    config = _launch_config(words, options)
    with contextlib.ExitStack() as stack:
        if is_shown and config.events is not None:
            stack.enter_context(page_beside(config.events, at or "", _say))
        result = launch_with_restarts(config, RestartConfig(**options), _say)
    if report and config.events is not None:
        try:
            write_report(config.events, report)
            _say(f"report {report}; `elche report {config.events}` writes it again")
        except (ConfigError, OSError) as error:
            _say(f"no report: {error}")
    if failure := _failure_line(result, config.world_size):
        _say(failure)
    sys.exit(result.exit_code)


def _say(line: str) -> None:
    click.echo(f"elche run: {line}", err=True)


def _syntax_error(script: str) -> str:
    """The script's syntax error as Python prints it, once for all ranks; "" if none."""
    with contextlib.suppress(OSError, ValueError):  # each rank reports these
        if script.endswith(".py"):
            try:
                compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
            except SyntaxError as error:
                return "".join(traceback.format_exception_only(error))
    return ""


def _launch_config(words: tuple[str, ...], options: dict[str, Any]) -> LaunchConfig:
    """Makes the launch configuration; `RestartConfig`'s options stay in ``options``.

    Args:
        words: the script, or ``-m`` and a module, and its arguments.
        options: option values by name.

    Raises:
        ConfigError: options contradict each other.
    """
    from elche.monitor.live_run import ProgressLines, open_display
    from elche.runtime.process.launch_config import LaunchConfig, python_command

    names = ("policy", "min_ranks", "story", "trace", "quiet", "speeds", "events")
    policy, least, story, trace, is_quiet, speeds, events = map(options.pop, names)
    times = {name: options.pop(name) for name in ("ms_per_sample", "fixed_ms")}
    display = None if is_quiet else open_display()
    emulated = {name: each for name, each in times.items() if each is not None}
    if emulated and speeds is None:
        raise ConfigError(
            "--ms-per-sample and --fixed-ms are for emulated devices; give their "
            "--speeds, such as 1,0.25"
        )
    check_outputs(story, trace)
    return LaunchConfig(
        command=python_command(*words),
        num_ranks=options.pop("nproc"),
        devices=options.pop("devices"),
        speeds=speeds,
        environment={
            **({"ELCHE_POLICY": policy} if policy else {}),
            **({"ELCHE_MIN_RANKS": str(least)} if least else {}),
        },
        story_path=story,
        trace_path=trace,
        display=display,
        on_view=None if is_quiet else (display or ProgressLines(_say)).draw,
        events=events,
        appends_events=options["resume"],
        rejoin=options.pop("rejoin"),
        **emulated,
    )


def _failure_line(result: LaunchResult, world_size: int) -> str:
    """Message about failed ranks, or ranks that never connected; "" on success."""
    failed = [rank for rank, code in enumerate(result.exit_codes) if code]
    if failed:
        reason = result.reason.splitlines()[0] if result.reason else "see their output"
        if result.terminated:
            lacks = ": a last checkpoint may be missing" if result.signal else ""
            reason += (
                f"; ranks {list(result.terminated)} did not exit in time and were "
                f"killed{lacks}"
            )
        codes = ", ".join(_with_signal(result.exit_codes[rank]) for rank in failed)
        return f"ranks {failed} ended with codes [{codes}]: {reason}"
    if world_size > 1 and not (result.have_met or result.signal):
        return (
            f"the script ran {world_size} times, and no ranks connected: train "
            "through elche.setup, elche.Trainer, elche.init_group or torch.distributed"
        )
    return ""


def _with_signal(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"{code} ({signal.Signals(code - 128).name})"
    return str(code)
