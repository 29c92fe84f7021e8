# SPDX-License-Identifier: Apache-2.0
"""LMCache's options: kept, set or refused at start-up."""
