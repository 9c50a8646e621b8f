"""elche's pipeline beside torch's, on emulated devices."""
