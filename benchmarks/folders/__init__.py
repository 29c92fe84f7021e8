# SPDX-License-Identifier: Apache-2.0
"""Reads of records through the connector to ``fs://`` beside plain reads of the same files."""
