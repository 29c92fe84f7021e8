# SPDX-License-Identifier: Apache-2.0
"""Real servers, asked by ``vllm bench serve``: first tokens and throughput over HTTP."""
