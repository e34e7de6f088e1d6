"""`make fuzz`: everything that reads HLO text or JSON is given mutated files. See `__main__`."""

from __future__ import annotations

from shared_tests.tool.fuzz.documents import make as make
from shared_tests.tool.fuzz.documents import places as places
from shared_tests.tool.fuzz.shares import KINDS as KINDS
from shared_tests.tool.fuzz.shares import Share as Share
from shared_tests.tool.fuzz.shares import Tally as Tally
from shared_tests.tool.fuzz.trial import Flaw as Flaw
from shared_tests.tool.fuzz.trial import one as one
from shared_tests.tool.fuzz.trial import time_limit as time_limit
