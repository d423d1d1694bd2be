"""`python -m moe_pack.runtime.cli` is `moe-run`."""

from moe_pack.runtime.cli.main import main

main()
