# SPDX-License-Identifier: Apache-2.0
from ..store_box import box, valkey  # noqa: F401
