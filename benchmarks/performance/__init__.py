# SPDX-License-Identifier: Apache-2.0
"""How long a restore, a save, a lookup and a step take, beside what bounds them."""
