# SPDX-License-Identifier: Apache-2.0
"""What ``lmcache-hybrid doctor`` checks. One function per check, see :mod:`.__main__`."""
