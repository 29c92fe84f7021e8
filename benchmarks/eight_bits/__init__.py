# SPDX-License-Identifier: Apache-2.0
"""What states in eight bits would change in a model's answers, and what they would save."""
