"""From lease to batch on the device."""
