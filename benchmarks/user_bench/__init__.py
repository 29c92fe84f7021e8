# SPDX-License-Identifier: Apache-2.0
"""What ``lmcache-hybrid bench`` prints, for a page."""
