# SPDX-License-Identifier: Apache-2.0
"""Operators' commands. No engine imports anything from here."""
