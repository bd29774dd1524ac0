// Command hello stands for the longshore binary in the image of the test.
package main

import "fmt"

func main() { fmt.Println("hello") }
