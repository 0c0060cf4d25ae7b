"""What all engines do alike: accept or refuse requests, cut samples into chunks, count how busy they are."""
