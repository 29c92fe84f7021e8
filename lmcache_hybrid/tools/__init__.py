# SPDX-License-Identifier: Apache-2.0
"""What operators run. No engine imports anything from here."""
