# SPDX-License-Identifier: Apache-2.0
from ..store_box import blocked_loops, box, valkey  # noqa: F401
