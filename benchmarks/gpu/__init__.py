# SPDX-License-Identifier: Apache-2.0
"""What needs a GPU, and the page of what one has shown."""
