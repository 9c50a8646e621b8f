"""The path of a batch from lease to device."""
