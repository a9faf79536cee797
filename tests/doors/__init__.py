"""What people do to the library by mistake: wrong settings, damaged files, two processes at once."""
