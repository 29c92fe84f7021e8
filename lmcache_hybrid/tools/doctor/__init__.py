# SPDX-License-Identifier: Apache-2.0
"""The checks of ``lmcache-hybrid doctor``. One function per check, see :mod:`.__main__`."""
