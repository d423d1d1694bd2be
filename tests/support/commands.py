"""The commands, run in this process."""

from click.testing import CliRunner, Result

from moe_pack.convert.cli.main import main as pack_command
from moe_pack.runtime.cli.main import main as run_command


def moe_pack(*arguments: object) -> Result:
    """Runs `moe-pack`."""
    return CliRunner().invoke(pack_command, [str(argument) for argument in arguments], prog_name="moe-pack")


def moe_run(*arguments: object, text: str | None = None) -> Result:
    """Runs `moe-run`, with a text on standard input."""
    return CliRunner().invoke(run_command, [str(argument) for argument in arguments], input=text, prog_name="moe-run")


def done(*arguments: object) -> Result:
    """Runs `moe-pack`, which has to succeed."""
    result = moe_pack(*arguments)
    assert result.exit_code == 0, result.output
    return result
