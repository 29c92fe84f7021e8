# SPDX-License-Identifier: Apache-2.0
"""Folders of ``fs://``, which several engines share and LMCache never cleans."""
