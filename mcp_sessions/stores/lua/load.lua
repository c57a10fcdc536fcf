-- needs: session
-- ARGV: now; empty: whatever its deadline
local found = record()
if found and ARGV[1] ~= '' and tonumber(ARGV[1]) >= seconds(found[1][6]) then
    return false
end
return found
