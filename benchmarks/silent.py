"""Process groups that send nothing, for what a step takes without communication.

torch's "fake" backend is registered by a private module, which no other file imports; init_process_group does the same.
"""

from __future__ import annotations

import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

SILENT = "fake"  # torch's backend whose collectives return at once
