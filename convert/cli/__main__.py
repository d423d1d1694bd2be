"""`python -m moe_pack.convert.cli` is `moe-pack`."""

from moe_pack.convert.cli.main import main

main()
