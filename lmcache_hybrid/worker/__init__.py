# SPDX-License-Identifier: Apache-2.0
"""Worker side: copies between vLLM's pages and the store."""
