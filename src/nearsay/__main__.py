"""`python -m nearsay`, the same as the command `nearsay`."""

import sys

from nearsay.cli import main

sys.exit(main())
