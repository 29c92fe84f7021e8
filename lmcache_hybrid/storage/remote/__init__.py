# SPDX-License-Identifier: Apache-2.0
"""Connectors to shared folders, Redis and S3, in place of LMCache's."""
