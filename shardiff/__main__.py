"""`python -m shardiff` is the command."""

import sys

from shardiff.cli.main import main

sys.exit(main())
