# SPDX-License-Identifier: Apache-2.0
"""How deep a repeated prompt hits beside a drafter, without and with this connector."""
