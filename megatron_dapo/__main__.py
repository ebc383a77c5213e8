"""`python -m megatron_dapo`: the command line."""

import sys

from megatron_dapo.cli import main

sys.exit(main())
