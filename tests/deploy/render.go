// Renders a chart as Helm does, with the engine and the functions that Helm uses: text/template and sprig.
// Reads {"templates": {name: text}, "release": name, "values": {…}} and writes the manifests.
package main

import (
	"encoding/json"
	"log"
	"os"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
)

type input struct {
	Templates map[string]string
	Release   string
	Values    map[string]interface{}
}

func main() {
	var in input
	check(json.NewDecoder(os.Stdin).Decode(&in))
	all := template.New("").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	delete(functions, "env") // Helm has none of these
	delete(functions, "expandenv")
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out strings.Builder
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	all.Funcs(functions)
	names := []string{}
	for name, text := range in.Templates {
		_, err := all.New(name).Parse(text)
		check(err)
		if !strings.HasPrefix(name, "_") {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	data := map[string]interface{}{"Values": in.Values, "Release": map[string]string{"Name": in.Release, "Namespace": "default", "Service": "Helm"}}
	for _, name := range names {
		os.Stdout.WriteString("---\n")
		check(all.ExecuteTemplate(os.Stdout, name, data))
		os.Stdout.WriteString("\n")
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
