"""`python -m colibri_offload.cli` is the command `colibri`."""

import sys

from colibri_offload.cli.main import main

sys.exit(main())
