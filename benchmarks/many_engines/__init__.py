# SPDX-License-Identifier: Apache-2.0
"""Many engines' stores on one Redis, folder or bucket, without their models."""
