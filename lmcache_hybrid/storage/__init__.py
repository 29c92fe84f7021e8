# SPDX-License-Identifier: Apache-2.0
"""Stores records in LMCache's storage backends, and looks them up there."""
