# SPDX-License-Identifier: Apache-2.0
"""This package beside other connectors that keep the prefix cache of a hybrid model."""
