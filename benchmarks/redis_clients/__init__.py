# SPDX-License-Identifier: Apache-2.0
"""Clients of Redis beside bare sockets: how fast they are, and what they make of faults."""
