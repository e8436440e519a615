"""What is started: a program for each leg; ``legs.py`` says what they take."""
